"""The end of a run whose loss or gradients were not finite too often: what the last bad step saw is kept, to be looked at."""

import sys

from megatron_patch.data.batch import PackedBatch
from megatron_patch.data.batch_file import KeptBatch, write_batches
from megatron_patch.devices import ranks
from megatron_patch.errors import NonFiniteError
from megatron_patch.training.setup import Run
from megatron_patch.training.step import StepResult

FOLDER = "non_finite"


def end_non_finite(run: Run, failures: int, batches: list[PackedBatch], result: StepResult) -> None:
    """Write every rank's micro-batches of the last step to SAVE/non_finite, and end the run. All ranks call it.

    Args:
        failures: skipped steps in a row.
        batches, result: of the last of them.

    Raises:
        NonFiniteError: always.
    """
    steps, progress = run.settings.steps, run.progress
    folder = run.settings.output.save / FOLDER
    _keep(run, batches, result)
    with ranks.agreement():
        raise NonFiniteError(
            f"loss or gradients were not finite {failures} steps in a row (--max-non-finite-steps {steps.max_non_finite_steps}), "
            f"the last at iteration {progress.iteration}, whose micro-batches are in "
            f"{folder / _name(progress.iteration, '*')} (data/show_samples.py shows them); lower --lr, or look at the data of "
            f"samples {progress.consumed_samples - failures * steps.global_batch_size} to {progress.consumed_samples}"
        )


def _keep(run: Run, batches: list[PackedBatch], result: StepResult) -> None:
    iteration = run.progress.iteration
    samples = run.data.samples_of(run.progress.consumed_samples - run.settings.steps.global_batch_size)
    kept = [KeptBatch(batch, *which, loss) for batch, which, loss in zip(batches, samples, result.losses, strict=True)]
    meta = {
        "kind": run.identity.kind,
        "iteration": str(iteration),
        "rank": str(ranks.rank()),
        "tokenizer": str(run.settings.model.base_model),
        "tokenizer_sha256": run.data.tokenizer_sha256,
    }
    file = run.settings.output.save / FOLDER / _name(iteration, f"{ranks.rank():04d}")
    try:
        write_batches(file, kept, meta)
    except OSError as error:  # the run's end, and its exit code, are those of the loss
        print(f"note: {file} could not be written: {error}", file=sys.stderr, flush=True)


def _name(iteration: int, rank: str) -> str:
    return f"iter_{iteration:07d}_rank{rank}.safetensors"
