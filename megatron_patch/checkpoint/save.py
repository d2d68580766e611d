"""Training checkpoints: only what trains, beside a manifest that names the base.

    SAVE/latest_checkpointed_iteration.txt               "100", written last
    SAVE/iter_0000100/model.safetensors                  trainable parameters, megatron-core names, global numbers
    SAVE/iter_0000100/optimizer_rank0000.safetensors     the optimizer's state, fp32 main parameters (`optimizer_state`);
                                                         one file for each rank that holds a part of it
    SAVE/iter_0000100/training.pt                        schedule, every rank's RNG
    SAVE/iter_0000100/manifest.json                      how far, layout, hashes; see `checkpoint.manifest`

No file depends on the layout that wrote it. Why not `megatron.core.dist_checkpointing`: docs/upcycle.md.

A checkpoint is written beside its place and renamed, so that a crash leaves the one before it. All ranks see one
file system.
"""

import contextlib
import io
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_patch.checkpoint.manifest import (
    LATEST_FILE,
    OPTIMIZER_FILE,
    TRAINING_FILE,
    WEIGHTS_FILE,
    BaseReference,
    Layout,
    TrainingManifest,
    iteration_path,
    saved_iterations,
)
from megatron_patch.devices import ranks
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.publish import atomic_directory, atomic_write_text
from megatron_patch.io.write_safetensors import write_safetensors
from megatron_patch.model.architecture import DsaSettings
from megatron_patch.model.names import expert_number, global_name, trainable


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
    optimizer_state: Mapping[str, Tensor] | None = None,
    experts: range | None = None,
) -> Path:
    """Write and publish the checkpoint of `progress.iteration`; returns its directory. All ranks call it.

    Args:
        save: the run's --save directory.
        model: bare megatron-core model; its trainable parameters are written.
        training_state: of all ranks; tensors, numbers and containers of them only (it is read with `weights_only=True`).
        identity, progress: for the manifest.
        keep_last: checkpoints to keep, the oldest go; 0 keeps all.
        layout: of the run; None: one process.
        optimizer_state: the part that this rank writes.
        experts: global numbers of the experts that this rank holds; None: all.
    """
    target, main = iteration_path(save, progress.iteration), ranks.is_main()
    weights = gather_weights(model, experts)
    directory = target
    with contextlib.ExitStack() as publication:  # rank 0's: it is renamed when the block ends well, else removed
        with ranks.agreement():
            if main:
                directory = publication.enter_context(atomic_directory(target, must_be_empty=False))
        directory, hashes = ranks.broadcast(directory), {}
        with ranks.agreement():
            if main:
                hashes[WEIGHTS_FILE] = write_safetensors(directory / WEIGHTS_FILE, weights)
                # Through memory: torch reports a full disk as an internal error, a file of Python's does not.
                packed = io.BytesIO()
                torch.save(training_state, packed)
                (directory / TRAINING_FILE).write_bytes(packed.getbuffer())
                hashes[TRAINING_FILE] = file_sha256(directory / TRAINING_FILE)
            if optimizer_state:
                name = OPTIMIZER_FILE.format(ranks.rank())
                hashes[name] = write_safetensors(directory / name, optimizer_state)
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
                    layout=layout or Layout(),
                ).write(directory)
                publication.close()
                _point_to_latest(save, progress.iteration, keep_last)
    return target


def gather_weights(model: torch.nn.Module, experts: range | None) -> dict[str, Tensor]:
    """On rank 0 everything that trains, by global name; the experts of other ranks are fetched, and lie on the CPU."""
    own = trainable(model, experts)
    if experts is None:
        return own
    from megatron.core import parallel_state

    if parallel_state.get_expert_data_parallel_rank() != 0:  # a copy of what rank 0's group holds
        return {}
    group, weights = parallel_state.get_expert_model_parallel_group(), {}
    for name, parameter in own.items():
        if expert_number(name) is None:
            weights[name] = parameter
            continue
        parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, parameter.detach().contiguous(), group=group)
        if ranks.is_main():
            for number, part in enumerate(parts):
                first = number * len(experts)
                weights[global_name(name, range(first, first + len(experts)))] = part.cpu()
    return weights


def _point_to_latest(save: Path, iteration: int, keep_last: int) -> None:
    atomic_write_text(save / LATEST_FILE, f"{iteration}\n")
    if keep_last:  # a later one is of a run that was taken back, and no reason to drop an earlier one
        for old in [number for number in saved_iterations(save) if number <= iteration][:-keep_last]:
            shutil.rmtree(iteration_path(save, old))


def clear_leftovers(save: Path) -> None:
    """Remove what a run that was killed while it wrote a checkpoint left beside the whole ones. Hold the directory first."""
    for leftover in sorted([*save.glob(".iter_*.partial-*"), *save.glob(".iter_*.replaced-*")]):
        print(f"note: {leftover} was left by a run that was killed while it saved; removed", file=sys.stderr)
        shutil.rmtree(leftover)
