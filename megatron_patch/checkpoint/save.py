"""Training checkpoints: only what trains, beside a manifest that names the base.

    SAVE/latest_checkpointed_iteration.txt               "100", written last
    SAVE/iter_0000100/model.safetensors                  trainable parameters, megatron-core names, global numbers
    SAVE/iter_0000100/optimizer_rank0000.safetensors     the optimizer's state, fp32 main parameters (`optimizer_state`);
                                                         one file for each rank that holds a part of it
    SAVE/iter_0000100/training.pt                        schedule, every rank's RNG
    SAVE/iter_0000100/manifest.json                      how far, layout, hashes; see `checkpoint.manifest`

No file depends on the layout that wrote it. Why not `megatron.core.dist_checkpointing`: docs/upcycle.md.

A checkpoint is written beside its place and renamed, so that a crash leaves the one before it. All ranks see one
file system. It is taken (`take_snapshot`), written (each rank its files, which a thread may do: `checkpoint.saver`) and
published (by rank 0, when all have written).
"""

import contextlib
import hashlib
import io
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
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
from megatron_patch.io.publish import atomic_directory, atomic_write_text, flush, naming_full_disk
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


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint before it is written: what this rank writes of it, and what its manifest will say.

    Attributes:
        target: the checkpoint's directory.
        manifest: without the files.
        weights: rank 0's: everything that trains.
        training: rank 0's: training.pt's content.
        optimizer: this rank's part of the optimizer's state.
    """

    target: Path
    manifest: TrainingManifest
    weights: Mapping[str, Tensor]
    training: bytes | None
    optimizer: Mapping[str, Tensor]


def take_snapshot(
    save: Path,
    model: torch.nn.Module,
    training_state: dict,
    identity: Identity,
    progress: Progress,
    layout: Layout | None = None,
    optimizer_state: Mapping[str, Tensor] | None = None,
    experts: range | None = None,
    *,
    copy: bool = False,
) -> Snapshot:
    """What a checkpoint of `progress.iteration` holds, as it is now. All ranks call it.

    Args:
        save: the run's --save directory.
        model: bare megatron-core model; its trainable parameters are written.
        training_state: of all ranks; tensors, numbers and containers of them only (it is read with `weights_only=True`).
        identity, progress: for the manifest.
        layout: of the run; None: one process.
        optimizer_state: the part that this rank writes.
        experts: global numbers of the experts that this rank holds; None: all.
        copy: into host memory, so that training may go on before it is written; else the tensors are the run's own.
    """
    weights, training = gather_weights(model, experts, copy=copy), None
    with ranks.agreement():
        if ranks.is_main():
            # Through memory: torch reports a full disk as an internal error, a file of Python's does not.
            packed = io.BytesIO()
            torch.save(training_state, packed)
            training = packed.getvalue()
        optimizer = {name: _held(tensor, copy) for name, tensor in (optimizer_state or {}).items()}
    manifest = TrainingManifest(
        kind=identity.kind,
        **asdict(progress),
        base=BaseReference(identity.base_path, identity.base_sha256),
        layer_pattern=identity.layer_pattern,
        dsa=identity.dsa,
        q_rank=identity.q_rank,
        frozen_sha256=identity.frozen_sha256,
        files={},
        layout=layout or Layout(),
    )
    return Snapshot(iteration_path(save, progress.iteration), manifest, weights, training, optimizer)


def _held(tensor: Tensor, copy: bool) -> Tensor:
    return tensor.detach().to("cpu", copy=True) if copy else tensor


def write_snapshot(snapshot: Snapshot, directory: Path) -> dict[str, str]:
    """Write this rank's files and wait until they are on its disk; their hashes by name.

    It calls no other rank and nothing that is the whole process's (umask, signals), so that a thread can run it.
    """
    hashes = {}
    if snapshot.training is not None:
        hashes[WEIGHTS_FILE] = write_safetensors(directory / WEIGHTS_FILE, snapshot.weights)
        (directory / TRAINING_FILE).write_bytes(snapshot.training)
        hashes[TRAINING_FILE] = hashlib.sha256(snapshot.training).hexdigest()
    if snapshot.optimizer:
        name = OPTIMIZER_FILE.format(ranks.rank())
        hashes[name] = write_safetensors(directory / name, snapshot.optimizer)
    for name in hashes:  # each rank its own: rank 0's flush of a file does not reach another machine's memory
        flush(directory / name)
    return hashes


class Writing:
    """A snapshot on its way to the disk: `write`, then `publish` or `abandon`. All ranks make one together.

    Args:
        snapshot: of this rank.
        keep_last: checkpoints to keep, the oldest go; 0 keeps all.
        check: raises where the checkpoint must not be published; called before it is written.
    """

    def __init__(self, snapshot: Snapshot, keep_last: int, check: Callable[[], None] | None = None):
        self.snapshot, self.keep_last, self._check = snapshot, keep_last, check
        self._publication = contextlib.ExitStack()  # rank 0's: renames when it is closed, removes after an exception
        self._hashes: dict[str, str] = {}
        self._error: Exception | None = None
        directory = snapshot.target
        with ranks.agreement():
            if ranks.is_main():
                directory = self._publication.enter_context(atomic_directory(snapshot.target, must_be_empty=False))
        self._directory = ranks.broadcast(directory)

    def write(self) -> None:
        """This rank's part, in any thread; a failure is kept for `publish`."""
        try:
            if self._check is not None:
                self._check()
            with naming_full_disk(self.snapshot.target):
                self._hashes = write_snapshot(self.snapshot, self._directory)
        except Exception as error:
            self._error = error

    def publish(self) -> None:
        """Name the checkpoint once every rank has written. All ranks call it.

        Raises:
            Exception: what a rank's `write` failed with, on all ranks; nothing is left of the checkpoint then.
        """
        with self._publication:
            with ranks.agreement():
                if self._error is not None:
                    raise self._error
            files = {name: sha256 for of_rank in ranks.gather(self._hashes) for name, sha256 in of_rank.items()}
            with ranks.agreement():
                if ranks.is_main():
                    manifest = replace(self.snapshot.manifest, files=files)
                    manifest.write(self._directory)
                    self._publication.close()
                    _point_to_latest(self.snapshot.target.parent, manifest.iteration, self.keep_last)

    def abandon(self) -> None:
        """Remove what this rank's directory holds; call it when `write` has ended."""
        with contextlib.suppress(_Abandoned), self._publication:
            raise _Abandoned


class _Abandoned(Exception):
    """Makes `atomic_directory` remove what it has."""


def gather_weights(model: torch.nn.Module, experts: range | None, *, copy: bool = False) -> dict[str, Tensor]:
    """On rank 0 everything that trains, by global name; the experts of other ranks are fetched, and lie on the CPU.

    Args:
        experts: global numbers of the experts that this rank holds; None: all.
        copy: all of it lies on the CPU, apart from the model.
    """
    own, main = trainable(model, experts), ranks.is_main()
    if experts is None:
        return {name: _held(parameter, copy) for name, parameter in own.items()} if main else {}
    from megatron.core import parallel_state

    if parallel_state.get_expert_data_parallel_rank() != 0:  # a copy of what rank 0's group holds
        return {}
    group, weights = parallel_state.get_expert_model_parallel_group(), {}
    for name, parameter in own.items():
        if expert_number(name) is None:
            weights[name] = _held(parameter, copy and main)
            continue
        parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, parameter.detach().contiguous(), group=group)
        if main:
            for number, part in enumerate(parts):
                first = number * len(experts)
                weights[global_name(name, range(first, first + len(experts)))] = part.cpu()
    return weights if main else {}


def _point_to_latest(save: Path, iteration: int, keep_last: int) -> None:
    atomic_write_text(save / LATEST_FILE, f"{iteration}\n")
    if keep_last:  # a later one is of a run that was taken back, and no reason to drop an earlier one
        for old in [number for number in saved_iterations(save) if number <= iteration][:-keep_last]:
            shutil.rmtree(iteration_path(save, old))


def clear_leftovers(save: Path) -> None:
    """Remove what a run that was killed while it wrote a checkpoint left beside the whole ones. Hold the directory first."""
    for leftover in sorted([*save.glob(".iter_*.partial-*"), *save.glob(".iter_*.replaced-*")]):
        print(f"note: {leftover} was left by a run that was killed while it saved; removed", file=sys.stderr)
        # Out of the way first: a rank that outlives its rank 0 by a moment may still be writing into it.
        shutil.rmtree(leftover.rename(leftover.with_name(f"{leftover.name}.removed")))
