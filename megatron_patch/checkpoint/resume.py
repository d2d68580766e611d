"""Read a training checkpoint back: choose one that is whole, refuse one that belongs to something else."""

import sys
from pathlib import Path

import torch

from megatron_patch.checkpoint.load_base import load_trained
from megatron_patch.checkpoint.manifest import (
    LATEST_FILE,
    TRAINING_FILE,
    WEIGHTS_FILE,
    TrainingManifest,
    iteration_directory,
    iteration_path,
    read_manifest,
    saved_iterations,
    verify_files,
)
from megatron_patch.checkpoint.optimizer_state import OptimizerState
from megatron_patch.checkpoint.save import Identity
from megatron_patch.config import BASE_INDEXERS
from megatron_patch.errors import UserError


def resumable_iterations(save: Path) -> list[int]:
    """Iterations that a run can go on from, the newest first: none beyond what `latest_checkpointed_iteration.txt` says.

    A run that is killed after its first checkpoint was published, and before the file was written, leaves none; every
    published iteration counts then.

    Raises:
        UserError: there is nothing.
    """
    saved = saved_iterations(save)
    try:
        latest = int((save / LATEST_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        latest = saved[-1] if saved else None
    found = [number for number in reversed(saved) if latest is not None and number <= latest]
    if not found:
        iteration_directory(save)  # says what there is
        raise UserError(f"a --save directory holds checkpoints: {save} has none; give the --save directory of a run")
    return found


def choose_checkpoint(save: Path, *, whole_state: bool) -> tuple[Path, TrainingManifest]:
    """The newest checkpoint of a run whose files are as they were saved; each one that is passed over is named on stderr.

    Args:
        save: a run's --save directory.
        whole_state: whether the optimizer's state is needed too.

    Raises:
        UserError: there is none; the message is about the newest.
    """
    reasons: list[tuple[Path, UserError]] = []
    for iteration in resumable_iterations(save):
        directory = iteration_path(save, iteration)
        try:
            manifest = read_manifest(directory)
            if manifest.iteration != iteration:
                raise UserError(
                    f"a checkpoint's directory has its iteration's number: {directory} is of iteration {manifest.iteration}; "
                    f"write that into {LATEST_FILE} to go back to it"
                )
            state = (TRAINING_FILE, *manifest.optimizer_files) if whole_state else ()
            verify_files(directory, manifest, only=(WEIGHTS_FILE, *state))
        except UserError as error:
            reasons.append((directory, error))
            continue
        for damaged, error in reasons:
            print(f"note: {damaged} is passed over, and {directory} used: {error}", file=sys.stderr, flush=True)
        return directory, manifest
    raise reasons[0][1]


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


def load_weights(
    checkpoint: Path,
    manifest: TrainingManifest,
    model: torch.nn.Module,
    identity: Identity,
    *,
    same_kind: bool,
    experts: range | None = None,
) -> None:
    """Fill the trainable parameters from a checkpoint that `choose_checkpoint` gave.

    Args:
        same_kind: refuse a checkpoint of another kind of training.
        experts: global numbers of the experts that this rank holds; None: all.

    Raises:
        UserError: it belongs to another base, structure or kind of training.
    """
    check_identity(manifest, identity, checkpoint, same_kind=same_kind)
    load_trained(model, checkpoint / WEIGHTS_FILE, local_experts=experts)


def load_training_state(checkpoint: Path, manifest: TrainingManifest) -> tuple[dict, OptimizerState]:
    """(what `take_snapshot` was given as `training_state`, the optimizer's state of all ranks).

    Only tensors, numbers and containers are unpickled.
    """
    common = torch.load(checkpoint / TRAINING_FILE, map_location="cpu", weights_only=True)
    return common, OptimizerState([checkpoint / name for name in manifest.optimizer_files])
