"""Where a run begins: from nothing, from a checkpoint's weights, or as the run that a checkpoint is of."""

from dataclasses import asdict
from pathlib import Path

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_patch.checkpoint.from_export import is_export, load_export_weights
from megatron_patch.checkpoint.manifest import Layout, TrainingManifest
from megatron_patch.checkpoint.resume import choose_checkpoint, load_training_state, load_weights
from megatron_patch.checkpoint.save import Identity, Progress
from megatron_patch.config import TrainSettings
from megatron_patch.errors import UserError
from megatron_patch.model.architecture import Architecture
from megatron_patch.training.state import pieces_of, restore_common, restore_optimizer


def choose_start(settings: TrainSettings) -> tuple[Path, TrainingManifest] | None:
    """The checkpoint that --load or --pretrained-checkpoint means; None: neither, or an export."""
    start = settings.start.load or settings.start.pretrained_checkpoint
    if start is None or (settings.start.load is None and is_export(start)):
        return None
    return choose_checkpoint(start, whole_state=settings.start.load is not None)


def load_start(
    settings: TrainSettings,
    arch: Architecture,
    model: GPTModel,
    identity: Identity,
    chosen: tuple[Path, TrainingManifest] | None,
    experts: range | None,
) -> Progress:
    """Fill what trains from the chosen checkpoint, or an export; how far a resumed run is."""
    progress, resumes = Progress(), settings.start.load is not None
    if chosen is not None:
        load_weights(*chosen, model, identity, same_kind=resumes, experts=experts)
    elif settings.start.pretrained_checkpoint is not None:
        load_export_weights(settings.start.pretrained_checkpoint, model, identity, arch, experts)
    if not resumes:
        return progress
    iteration = chosen[1].iteration
    if iteration > settings.steps.train_iters:
        raise UserError(
            f"--train-iters counts from the run's start: {settings.steps.train_iters} is below iteration {iteration}, where "
            f"{settings.start.load} stands; raise it"
        )
    return Progress(**{name: getattr(chosen[1], name) for name in asdict(progress)})


def restore_training(
    checkpoint: Path,
    manifest: TrainingManifest,
    model: GPTModel,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    layout: Layout,
    experts: range | None,
) -> None:
    """Give a resumed run its optimizer's state, schedule and random numbers, after its weights were loaded."""
    common, state = load_training_state(checkpoint, manifest)
    restore_common(common, scheduler, manifest.layout, layout)
    optimizer.reload_model_params()
    restore_optimizer(pieces_of(model, optimizer, experts), state, checkpoint, stepped=manifest.iteration > manifest.skipped)
