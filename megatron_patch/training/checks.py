"""What a run's flags must agree with before anything is built: its kind, its launch, its directories, its earlier self."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from megatron_patch.checkpoint.from_export import is_export
from megatron_patch.checkpoint.manifest import saved_iterations
from megatron_patch.checkpoint.resume import resumable_iterations
from megatron_patch.config import BASE_INDEXERS, SFT, TrainSettings
from megatron_patch.errors import UserError
from megatron_patch.io.strict_json import read_json
from megatron_patch.layout_rules import check_layout

CONFIG_FILE = "config.json"


def check_kind(settings: TrainSettings, kind: str) -> None:
    if settings.model.train == BASE_INDEXERS and kind == SFT:
        raise UserError(
            "base indexers learn from text: sft_upcycle.py trains DSA layers, --train is base-indexers; use pretrain_upcycle.py"
        )


def check_output(settings: TrainSettings) -> None:
    """--save is new or empty, unless it is the run that --load resumes."""
    save, load = settings.output.save, settings.start.load
    for start in (load, settings.start.pretrained_checkpoint):
        if start is not None and (start is load or not is_export(start)):
            resumable_iterations(start)  # refuse a directory without a checkpoint before the base is read
    if save.exists() and not save.is_dir():
        raise UserError(f"--save must be a directory: {save} is a file; give another path")
    if load is not None:
        _check_same_run(settings)
    if settings.resumes_in_place:
        return
    if save.is_dir() and any(save.iterdir()):
        resume = (
            f"resume it with --load {save}" if saved_iterations(save) else "it holds no checkpoint, so empty it"
        )
        raise UserError(f"--save must be new or empty: {save} is not; give another path, or {resume}")


def _check_same_run(settings: TrainSettings) -> None:
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
    for name in ("optimizer", "bf16", "seed"):
        if name in before and before[name] != now[name]:
            raise UserError(
                f"a resumed run keeps its --{name}: {settings.start.load} has {before[name]}, the command line {now[name]}; "
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
