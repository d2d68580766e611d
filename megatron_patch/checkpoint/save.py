"""Training checkpoints: only what trains, beside a manifest that names the base.

    SAVE/latest_checkpointed_iteration.txt      "100", written last
    SAVE/iter_0000100/model.safetensors         trainable parameters, megatron-core names
    SAVE/iter_0000100/training.pt               optimizer, fp32 main parameters, schedule, RNG, data position
    SAVE/iter_0000100/manifest.json             see `checkpoint.manifest`

With --use-distributed-optimizer on several ranks, training_rank0000.pt and so on stand in place of training.pt.
Otherwise every rank's optimizer holds the same, rank 0 writes it, and any number of ranks can go on with it.

A checkpoint is written beside its place and renamed, so that a crash leaves the one before it. All ranks see one
file system.
"""

import contextlib
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
    Layout,
    TrainingManifest,
    iteration_directory,
    iteration_path,
    read_manifest,
    verify_files,
)
from megatron_patch.config import BASE_INDEXERS
from megatron_patch.devices import ranks
from megatron_patch.errors import UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.publish import atomic_directory, atomic_write_text
from megatron_patch.model.architecture import DsaSettings


@dataclass(frozen=True)
class Identity:
    """What a checkpoint belongs to; one of another identity is refused by name.

    Attributes:
        kind: as in the manifest.
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
    save: Path,
    model: torch.nn.Module,
    training_state: dict,
    identity: Identity,
    progress: Progress,
    keep_last: int,
    layout: Layout | None = None,
) -> Path:
    """Write and publish the checkpoint of `progress.iteration`; returns its directory. All ranks call it.

    Args:
        save: the run's --save directory.
        model: bare megatron-core model; its trainable parameters are written.
        training_state: this rank's; tensors, numbers and containers of them only (it is read with `weights_only=True`).
        identity, progress: for the manifest.
        keep_last: checkpoints to keep, the oldest go; 0 keeps all.
        layout: of the run; None: one process.
    """
    target, main, layout = iteration_path(save, progress.iteration), ranks.is_main(), layout or Layout()
    directory, written = target, []
    with contextlib.ExitStack() as publication:  # rank 0's: it is renamed when the block ends well, else removed
        with ranks.agreement():
            if main:
                directory = publication.enter_context(atomic_directory(target, must_be_empty=False))
        directory = ranks.broadcast(directory)
        with ranks.agreement():
            if main:
                trainable = {n: p.detach().cpu().contiguous() for n, p in model.named_parameters() if p.requires_grad}
                save_file(trainable, directory / WEIGHTS_FILE, metadata={"format": "pt"})
                written.append(WEIGHTS_FILE)
            if layout.writes(ranks.rank()):
                written.append(layout.training_file(ranks.rank()))
                torch.save(training_state, directory / written[-1])
            hashes = {name: file_sha256(directory / name) for name in written}
        files = {name: sha256 for of_rank in ranks.gather(hashes) for name, sha256 in of_rank.items()}
        with ranks.agreement():
            if main:
                TrainingManifest(
                    kind=identity.kind,
                    **asdict(progress),
                    base=BaseReference(identity.base_path, identity.base_sha256),
                    layer_pattern=identity.layer_pattern,
                    dsa=identity.dsa,
                    q_rank=identity.q_rank,
                    frozen_sha256=identity.frozen_sha256,
                    files=files,
                    layout=layout,
                ).write(directory)
                publication.close()
                _point_to_latest(save, progress.iteration, keep_last)
    return target


def _point_to_latest(save: Path, iteration: int, keep_last: int) -> None:
    atomic_write_text(save / LATEST_FILE, f"{iteration}\n")
    if keep_last:
        for old in sorted(save.glob("iter_*"))[:-keep_last]:
            shutil.rmtree(old)


def check_identity(manifest: TrainingManifest, identity: Identity, where: Path, *, same_kind: bool) -> None:
    """Refuse a checkpoint of another base, structure or (for a full resume) kind of training.

    Raises:
        UserError: naming the first value that differs.
    """
    if (manifest.kind == BASE_INDEXERS) != (identity.kind == BASE_INDEXERS):
        has, wants = (kind if kind == BASE_INDEXERS else "DSA layers" for kind in (manifest.kind, identity.kind))
        raise UserError(
            f"base indexers and DSA layers train apart: {where} has {has}, the run trains {wants}; start from another "
            "checkpoint (`dsa-upcycle export --base-indexers` joins the two)"
        )
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


def check_layout(manifest: TrainingManifest, layout: Layout, where: Path) -> None:
    """Refuse to resume an optimizer's state that is cut otherwise than the run's.

    Raises:
        UserError: with both layouts.
    """
    found = manifest.layout
    if found.distributed_optimizer != layout.distributed_optimizer:
        flag = "--use-distributed-optimizer" if found.distributed_optimizer else "--no-use-distributed-optimizer"
        kind = "with" if found.distributed_optimizer else "without"
        raise UserError(
            f"a resumed run keeps its kind of optimizer: {where} was saved {kind} --use-distributed-optimizer; give {flag}, "
            "or start from its weights with --pretrained-checkpoint"
        )
    if found.distributed_optimizer and found.data_parallel != layout.data_parallel:
        raise UserError(
            "a checkpoint of the distributed optimizer resumes on as many data-parallel ranks as it was saved on: "
            f"{where} has {found.data_parallel}, the run {layout.data_parallel}; start {found.data_parallel} ranks, or "
            "start from its weights with --pretrained-checkpoint (without --use-distributed-optimizer any number resumes)"
        )


def load_weights(
    save: Path, model: torch.nn.Module, identity: Identity, *, same_kind: bool
) -> tuple[Path, TrainingManifest]:
    """Fill the trainable parameters from the latest checkpoint under `save`; returns its directory and manifest."""
    checkpoint = iteration_directory(save)
    manifest = read_manifest(checkpoint)
    if ranks.is_main():  # once is enough: the ranks see one file system
        layout = manifest.layout
        states = {layout.training_file(number) for number in range(layout.data_parallel)} if same_kind else set()
        verify_files(checkpoint, manifest, only=(WEIGHTS_FILE, *sorted(states)))
    check_identity(manifest, identity, checkpoint, same_kind=same_kind)
    load_trained(model, checkpoint / WEIGHTS_FILE)
    return checkpoint, manifest


def load_training_state(checkpoint: Path, layout: Layout) -> dict:
    """What `save_checkpoint` was given on this rank; only tensors, numbers and containers are unpickled."""
    return torch.load(checkpoint / layout.training_file(ranks.rank()), map_location="cpu", weights_only=True)
