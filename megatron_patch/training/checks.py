"""What a run's flags must agree with before anything is built: its kind, its launch, its directories, its earlier self."""

import json
import os
import platform
from dataclasses import asdict, replace
from pathlib import Path

from megatron_patch.checkpoint.from_export import is_export
from megatron_patch.checkpoint.manifest import saved_iterations
from megatron_patch.checkpoint.resume import resumable_iterations
from megatron_patch.config import BASE_INDEXERS, PRETRAIN, SFT, StartSettings, TrainSettings
from megatron_patch.data.row_store import check_place
from megatron_patch.devices import ranks
from megatron_patch.errors import UserError
from megatron_patch.io.publish import atomic_write_text
from megatron_patch.io.strict_json import read_json
from megatron_patch.layout_rules import check_layout

CONFIG_FILE = "config.json"
MARKER = ".torchrun"


def check_kind(settings: TrainSettings, kind: str) -> None:
    if settings.model.train == BASE_INDEXERS and kind == SFT:
        raise UserError(
            "base indexers learn from text: sft_upcycle.py trains DSA layers, --train is base-indexers; use pretrain_upcycle.py"
        )
    if kind == PRETRAIN and settings.output.trunk_cache is not None and not settings.repeats_rows:
        raise UserError(
            "--trunk-cache needs rows that come again: --epoch-rows fresh cuts others in each epoch; use --epoch-rows same"
        )


def goes_on(save: Path) -> bool:
    """Whether `torchrun --max-restarts` started this very run before: its agent stays, and starts the command again.

    A directory that was refused to the first start, because it holds something else, is refused to every other, too.
    """
    marker = save / MARKER
    return marker.is_file() and marker.read_text(encoding="utf-8") == _agent() != ""


def mark_start(save: Path) -> None:
    """Leave a mark of the torchrun that starts a run, for `goes_on`."""
    if agent := _agent():
        atomic_write_text(save / MARKER, agent)


def resumed_in_place(settings: TrainSettings) -> TrainSettings:
    """The settings of a run that torchrun starts again: it goes on with what it saved, or begins anew."""
    save = settings.output.save
    saved = bool(saved_iterations(save))
    if ranks.is_main():
        what = "goes on with what was saved" if saved else "nothing was saved yet, begins anew"
        print(f"note: torchrun starts this run again: {save}: {what}", flush=True)
    return replace(settings, start=StartSettings(load=save)) if saved else settings


def _agent() -> str:
    """The torchrun above this process: machine, process and when that started; empty without one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return f"{platform.node()} {parent} {started}"


def check_output(settings: TrainSettings, kind: str, again: bool = False) -> None:
    """--save is new or empty, unless it is the run that --load resumes, or (`again`) that torchrun starts once more."""
    save, load = settings.output.save, settings.start.load
    for start in (load, settings.start.pretrained_checkpoint):
        if start is not None and (start is load or not is_export(start)):
            resumable_iterations(start)  # refuse a directory without a checkpoint before the base is read
    if save.exists() and not save.is_dir():
        raise UserError(f"--save must be a directory: {save} is a file; give another path")
    if load is not None:
        _check_same_run(settings, kind)
    if settings.output.trunk_cache is not None:
        check_place(settings.output.trunk_cache)
    if settings.resumes_in_place or again:
        return
    if save.is_dir() and any(item.name != MARKER for item in save.iterdir()):
        resume = (
            f"resume it with --load {save}" if saved_iterations(save) else "it holds no checkpoint, so empty it"
        )
        raise UserError(f"--save must be new or empty: {save} is not; give another path, or {resume}")


def _check_same_run(settings: TrainSettings, kind: str) -> None:
    """What a resumed run cannot change without becoming another one; the rest of its flags may differ."""
    file = settings.start.load / CONFIG_FILE
    if not file.is_file():
        return
    try:
        before, now = dict(read_json(file)["settings"]), settings_as_json(settings)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"a run's {CONFIG_FILE} holds its settings: {file}: {error!r}; copy it again, or start from its weights with "
            "--pretrained-checkpoint"
        ) from None
    names = ["optimizer", "bf16", "seed"]
    if kind == PRETRAIN:  # chats are the same rows in any case
        names.append("epoch_rows")
        before["epoch_rows"] = before.get("epoch_rows") or ("same" if before.get("trunk_cache") else "fresh")
        now["epoch_rows"] = "same" if settings.repeats_rows else "fresh"
    for name in names:
        if name in before and before[name] != now[name]:
            raise UserError(
                f"a resumed run keeps its --{name.replace('_', '-')}: {settings.start.load} has {before[name]}, the command line "
                f"{now[name]}; "
                "give the old value, or start from its weights with --pretrained-checkpoint"
            )


def check_launch(settings: TrainSettings) -> None:
    """torchrun sets all of its variables; a WORLD_SIZE alone would train one rank's share without a word.

    The layout is checked before the ranks meet, for megatron-core's groups need one that divides.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1" and "RANK" not in os.environ:
        raise UserError(
            f"several processes are started by torchrun, which sets RANK: WORLD_SIZE is {size} and there is no RANK; "
            f"use torchrun --nproc-per-node {size}, or unset WORLD_SIZE"
        )
    check_layout(settings.launch(int(size)))


def settings_as_json(settings: TrainSettings) -> dict:
    """The settings as flat flags; paths as strings."""
    groups = asdict(settings).values()
    flat = {name: value for group in groups for name, value in group.items()}
    return json.loads(json.dumps(flat, default=lambda value: str(value) if isinstance(value, Path) else value))
