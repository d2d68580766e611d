"""Training checkpoints: only what trains, beside a manifest that names the base.

    SAVE/latest_checkpointed_iteration.txt      "100", written last
    SAVE/iter_0000100/model.safetensors         trainable parameters, megatron-core names
    SAVE/iter_0000100/training.pt               optimizer, fp32 main parameters, schedule, RNG, data position
    SAVE/iter_0000100/manifest.json             see `checkpoint.manifest`

A checkpoint is written beside its place and renamed, so that a crash leaves the one before it. This release saves from
one process and resumes on the same layout.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_patch.checkpoint.load_base import load_trained
from megatron_patch.checkpoint.manifest import (
    LATEST_FILE,
    WEIGHTS_FILE,
    BaseReference,
    TrainingManifest,
    iteration_directory,
    iteration_path,
    read_manifest,
    verify_files,
)
from megatron_patch.errors import UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.publish import atomic_directory, atomic_write_text
from megatron_patch.model.architecture import DsaSettings

TRAINING_FILE = "training.pt"


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
    target = iteration_path(save, progress.iteration)
    with atomic_directory(target, must_be_empty=False) as directory:
        trainable = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if p.requires_grad}
        save_file(trainable, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        torch.save(training_state, directory / TRAINING_FILE)
        TrainingManifest(
            kind=identity.kind,
            **asdict(progress),
            base=BaseReference(identity.base_path, identity.base_sha256),
            layer_pattern=identity.layer_pattern,
            dsa=identity.dsa,
            q_rank=identity.q_rank,
            frozen_sha256=identity.frozen_sha256,
            files={name: file_sha256(directory / name) for name in (WEIGHTS_FILE, TRAINING_FILE)},
        ).write(directory)
    atomic_write_text(save / LATEST_FILE, f"{progress.iteration}\n")
    if keep_last:
        for old in sorted(save.glob("iter_*"))[:-keep_last]:
            shutil.rmtree(old)
    return target


def check_identity(manifest: TrainingManifest, identity: Identity, where: Path, *, same_kind: bool) -> None:
    """Refuse a checkpoint of another base, structure or (for a full resume) kind of training.

    Raises:
        UserError: naming the first value that differs.
    """
    rows = [
        ("base", manifest.base.sha256, identity.base_sha256, "--base-model"),
        ("layer pattern", manifest.layer_pattern, identity.layer_pattern, "--dsa-layers"),
        ("indexer", (manifest.dsa, manifest.q_rank), (identity.dsa, identity.q_rank), "the --index-* flags"),
    ]
    if same_kind:
        rows.append(("kind of training", manifest.kind, identity.kind, "--pretrained-checkpoint instead of --load"))
    for name, found, wanted, flag in rows:
        if found != wanted:
            raise UserError(f"a checkpoint belongs to one {name}: {where} has {found}, the run {wanted}; change {flag}")


def load_weights(
    save: Path, model: torch.nn.Module, identity: Identity, *, same_kind: bool
) -> tuple[Path, TrainingManifest]:
    """Fill the trainable parameters from the latest checkpoint under `save`; returns its directory and manifest."""
    checkpoint = iteration_directory(save)
    manifest = read_manifest(checkpoint)
    verify_files(checkpoint, manifest, only=(WEIGHTS_FILE, TRAINING_FILE) if same_kind else (WEIGHTS_FILE,))
    check_identity(manifest, identity, checkpoint, same_kind=same_kind)
    load_trained(model, checkpoint / WEIGHTS_FILE)
    return checkpoint, manifest


def load_training_state(checkpoint: Path) -> dict:
    """What `save_checkpoint` was given; only tensors, numbers and containers are unpickled."""
    return torch.load(checkpoint / TRAINING_FILE, map_location="cpu", weights_only=True)
