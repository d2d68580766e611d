"""Training checkpoints: only what trains, beside a manifest that names the base.

    SAVE/latest_checkpointed_iteration.txt      "100", written last
    SAVE/iter_0000100/model.safetensors         trainable parameters, megatron-core names
    SAVE/iter_0000100/training.pt               optimizer, fp32 main parameters, schedule, RNG, data position
    SAVE/iter_0000100/manifest.json             see `Manifest`

A checkpoint is written beside its place and renamed, so that a crash leaves the one before it. This release saves from
one process and resumes on the same layout.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_patch.checkpoint.load_base import load_trained
from megatron_patch.errors import UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.publish import atomic_directory, atomic_write_text
from megatron_patch.model.architecture import DsaSettings

LATEST = "latest_checkpointed_iteration.txt"
MODEL, TRAINING, MANIFEST = "model.safetensors", "training.pt", "manifest.json"


@dataclass(frozen=True)
class Identity:
    """What a checkpoint belongs to; one of another identity is refused by name.

    Attributes:
        kind: "pretrain" or "sft".
        base_path, base_sha256: the base (`io.hashes.directory_identity`).
        layer_pattern, dsa: the model's structure.
        frozen_sha256: `model.freeze.frozen_sha256` of the loaded base.
    """

    kind: str
    base_path: str
    base_sha256: str
    layer_pattern: tuple[str, ...]
    dsa: DsaSettings
    q_rank: int
    frozen_sha256: str


@dataclass
class Progress:
    """How far a run has come."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped: int = 0


def iteration_directory(save: Path, iteration: int) -> Path:
    return save / f"iter_{iteration:07d}"


def latest_iteration(save: Path) -> int:
    """The iteration that `latest_checkpointed_iteration.txt` names.

    Raises:
        UserError: there is no checkpoint.
    """
    file = save / LATEST
    try:
        return int(file.read_text())
    except FileNotFoundError:
        raise UserError(
            f"a checkpoint directory has {LATEST}: {save} has none; give the --save directory of a run"
        ) from None
    except ValueError:
        raise UserError(
            f"{file} must hold an iteration: {file.read_text()!r}; write the number of an iter_ directory"
        ) from None


def save_checkpoint(
    save: Path, model: torch.nn.Module, training_state: dict, identity: Identity, progress: Progress, keep_last: int
) -> Path:
    """Write and publish the checkpoint of `progress.iteration`; returns its directory.

    Args:
        save: the run's --save directory.
        model: bare megatron-core model; its trainable parameters are written.
        training_state: tensors, numbers and containers of them only (it is read with `weights_only=True`).
        identity, progress: for the manifest.
        keep_last: checkpoints to keep, the oldest go; 0 keeps all.
    """
    target = iteration_directory(save, progress.iteration)
    with atomic_directory(target, must_be_empty=False) as directory:
        trainable = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if p.requires_grad}
        save_file(trainable, directory / MODEL, metadata={"format": "pt"})
        torch.save(training_state, directory / TRAINING)
        manifest = {
            "schema": 1,
            "kind": identity.kind,
            **asdict(progress),
            "base": {"path": identity.base_path, "sha256": identity.base_sha256},
            "layer_pattern": list(identity.layer_pattern),
            "dsa": {**asdict(identity.dsa), "q_rank": identity.q_rank},
            "frozen_sha256": identity.frozen_sha256,
            "files": {name: file_sha256(directory / name) for name in (MODEL, TRAINING)},
        }
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    atomic_write_text(save / LATEST, f"{progress.iteration}\n")
    if keep_last:
        for old in sorted(save.glob("iter_*"))[:-keep_last]:
            shutil.rmtree(old)
    return target


def read_manifest(checkpoint: Path) -> dict:
    """The manifest of an `iter_` directory, after its files' hashes were checked.

    Raises:
        UserError: it or a file that it names is missing or damaged.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"a checkpoint has a readable {MANIFEST}: {checkpoint}: {type(error).__name__}: {error}; use another one"
        ) from None
    for name, sha256 in files.items():
        file = checkpoint / name
        if not file.is_file() or file_sha256(file) != sha256:
            raise UserError(
                f"a checkpoint's files must be as they were saved: {file} is missing or damaged; use another one"
            )
    return manifest


def check_identity(manifest: dict, identity: Identity, where: Path, *, same_kind: bool) -> None:
    """Refuse a checkpoint of another base, structure or (for a full resume) kind of training.

    Raises:
        UserError: naming the first value that differs.
    """
    rows = [
        ("base", manifest["base"]["sha256"], identity.base_sha256, "--base-model"),
        ("layer pattern", tuple(manifest["layer_pattern"]), identity.layer_pattern, "--dsa-layers"),
        ("indexer", manifest["dsa"], {**asdict(identity.dsa), "q_rank": identity.q_rank}, "the --index-* flags"),
    ]
    if same_kind:
        rows.append(("kind of training", manifest["kind"], identity.kind, "--pretrained-checkpoint instead of --load"))
    for name, found, wanted, flag in rows:
        if found != wanted:
            raise UserError(f"a checkpoint belongs to one {name}: {where} has {found}, the run {wanted}; change {flag}")


def load_weights(save: Path, model: torch.nn.Module, identity: Identity, *, same_kind: bool) -> tuple[Path, dict]:
    """Fill the trainable parameters from the latest checkpoint under `save`; returns its directory and manifest."""
    checkpoint = iteration_directory(save, latest_iteration(save))
    manifest = read_manifest(checkpoint)
    check_identity(manifest, identity, checkpoint, same_kind=same_kind)
    load_trained(model, checkpoint / MODEL)
    return checkpoint, manifest


def load_training_state(checkpoint: Path) -> dict:
    """What `save_checkpoint` was given; only tensors, numbers and containers are unpickled."""
    return torch.load(checkpoint / TRAINING, map_location="cpu", weights_only=True)
