"""The run: build, load, train, evaluate, save. `pretrain_upcycle.py` and `sft_upcycle.py` call `train`."""

import contextlib
import math
from collections import deque
from itertools import islice

from tqdm import tqdm

from megatron_patch.checkpoint.save import take_snapshot
from megatron_patch.config import BASE_INDEXERS, StepSettings, TrainSettings
from megatron_patch.data.batch import PackedBatch
from megatron_patch.devices import ranks
from megatron_patch.devices.device import Device
from megatron_patch.errors import UserError
from megatron_patch.io.publish import atomic_write_text
from megatron_patch.model.dsa_state import DENSE, SPARSE
from megatron_patch.model.freeze import combined_sha256, frozen_hashes, merged_hashes, trained_hashes
from megatron_patch.training.base_recall import measure_recall, report_recall
from megatron_patch.training.non_finite import end_non_finite
from megatron_patch.training.profile import StepProfile
from megatron_patch.training.setup import Run, hold_save, set_up
from megatron_patch.training.signals import StopRequest
from megatron_patch.training.state import common_state, optimizer_tensors, pieces_of
from megatron_patch.training.step import StepResult


def train(settings: TrainSettings, kind: str, device: Device) -> int:
    """Run training to its end, or to a signal or time limit.

    Args:
        settings: all flags.
        kind: "pretrain" or "sft".
        device: activated.

    Returns:
        0. The run's files are under `settings.output.save`, written by rank 0.

    Raises:
        UserError: a rule of the settings, the base or the data is broken; nothing was trained.
        NonFiniteError: too many non-finite steps in a row.
    """
    stop = StopRequest(settings.steps.exit_duration_in_mins)  # first: a signal while the base loads is not lost
    try:
        with ranks.one_reason(), hold_save(settings):
            run = set_up(settings, kind, device)
            with contextlib.closing(run.metrics), run.saver:
                return _train(run, stop)
    finally:
        stop.restore()


def _train(run: Run, stop: StopRequest) -> int:
    settings, progress = run.settings, run.progress
    steps = settings.steps
    recent: deque[StepResult] = deque(maxlen=steps.log_interval)
    last_bad: tuple[list[PackedBatch], StepResult] | None = None
    failures, saved_at = 0, progress.iteration if settings.resumes_in_place else None
    started_at, reason = progress.iteration, stop.reason(run.device)
    if progress.iteration == 0 and reason is None:
        _evaluate(run)
    with _profile(run) as profile, _bar(run) as bar:
        while progress.iteration < steps.train_iters:
            if (reason := stop.reason(run.device)) is not None:
                break
            run.saver.publish_if_written(run.device.sums_device)
            profile.begin(progress.iteration + 1)
            batches = list(islice(run.data.train, run.micro_batches))
            profile.data_is_there()
            rate = run.optimizer.param_groups[0]["lr"]
            run.state.recall = _is_logged(steps, progress.iteration + 1)
            result = run.step(batches, stage_at(settings, progress.iteration))
            progress.iteration += 1
            profile.end(progress.iteration)
            progress.consumed_samples += steps.global_batch_size
            progress.consumed_tokens += result.tokens
            failures = failures + 1 if result.skipped else 0
            if result.skipped:
                _report_skip(run, failures)
                last_bad = batches, result
                if failures >= steps.max_non_finite_steps:
                    break
            else:
                run.scheduler.step(increment=1)
                recent.append(result)
            bar.set_postfix(_postfix(run, result), refresh=False)
            bar.update()
            if progress.iteration % steps.log_interval == 0 and recent:
                _log(run, recent, rate)
                recent.clear()
            if steps.eval_interval and progress.iteration % steps.eval_interval == 0:
                _evaluate(run)
            if settings.output.save_interval and progress.iteration % settings.output.save_interval == 0:
                _save(run, background=settings.output.async_save and progress.iteration < steps.train_iters)
                saved_at = progress.iteration
    run.saver.finish()
    if failures >= steps.max_non_finite_steps:
        end_non_finite(run, failures, *last_bad)
    if recent:
        _log(run, recent, rate)
    reason = reason or stop.reason(run.device)
    unevaluated = progress.iteration > started_at and steps.eval_interval and progress.iteration % steps.eval_interval
    if unevaluated and reason is None:
        _evaluate(run)  # who asked for a stop wants the checkpoint now
    if saved_at != progress.iteration:
        _save(run)
    if settings.model.train == BASE_INDEXERS and reason is None:
        _report_recall(run)
    if ranks.is_main():
        why = f" ({reason})" if progress.iteration < steps.train_iters else ""
        print(f"saved iteration {progress.iteration} of {steps.train_iters} to {settings.output.save}{why}")
    return 0


def _is_logged(steps: StepSettings, iteration: int) -> bool:
    """Whether a row ends with this step: it alone computes the recall, which costs the logits of dense attention."""
    return iteration % steps.log_interval == 0 or iteration == steps.train_iters


def _bar(run: Run) -> tqdm:
    """Rank 0's progress bar."""
    steps, done = run.settings.steps.train_iters, run.progress.iteration
    return tqdm(total=steps, initial=done, desc=run.identity.kind, unit="step", disable=not ranks.is_main())


def _note(line: str) -> None:
    """A line above rank 0's progress bar."""
    if ranks.is_main():
        tqdm.write(line)


def _peak_memory_mb(run: Run) -> float:
    """The highest of all ranks."""
    return ranks.highest(run.device.peak_memory_mb(), run.device.sums_device)


def stage_at(settings: TrainSettings, iteration: int) -> str:
    """The indexers' stage in the step after `iteration` steps; beside a base's layers attention is always dense."""
    if settings.model.train == BASE_INDEXERS:
        return DENSE
    return DENSE if iteration < settings.optim.indexer_warmup_iters else SPARSE


def _postfix(run: Run, result: StepResult) -> dict[str, str]:
    """What stands behind the progress bar."""
    shown = {"loss": f"{result.lm_loss:.3f}", "kl": f"{result.indexer_kl:.3f}"}
    if result.trunk_cached is not None:
        shown["cached"] = f"{result.trunk_cached:.0%}"
    share = _mfu(run, _tflops(run, result.flops, result.seconds))
    return shown if share is None else shown | {"mfu": f"{share:.1%}"}


def _tflops(run: Run, flops: float, seconds: float) -> float:
    """TFLOP/s of one device."""
    return flops / seconds / 1e12 / run.step.ranks


def _mfu(run: Run, tflops: float) -> float | None:
    """The share of --peak-tflops; None where no peak is declared."""
    peak = run.settings.precision.peak_tflops
    return None if peak is None else tflops / peak


def _log(run: Run, results: deque[StepResult], rate: float) -> None:
    """A row of means over the steps since the last row; the recall is the last step's, null where that step was skipped."""

    def mean(name: str) -> float:
        return math.fsum(getattr(result, name) for result in results) / len(results)

    seconds, tokens = mean("seconds"), mean("tokens")
    tflops = _tflops(run, mean("flops"), seconds)
    run.metrics.write(
        "train",
        iteration=run.progress.iteration,
        consumed_samples=run.progress.consumed_samples,
        consumed_tokens=run.progress.consumed_tokens,
        lm_loss=mean("lm_loss"),
        indexer_kl=mean("indexer_kl"),
        index_recall=results[-1].index_recall,
        grad_norm=mean("grad_norm"),
        learning_rate=rate,
        tokens_per_second=tokens / seconds,
        step_seconds=seconds,
        peak_memory_mb=_peak_memory_mb(run),
        skipped=run.progress.skipped,
        stage=run.state.stage,
        tflops_per_device=tflops,
        mfu=_mfu(run, tflops),
        trunk_cached=None if run.step.trunk is None else mean("trunk_cached"),
    )


def _evaluate(run: Run) -> None:
    if not run.settings.steps.eval_interval:
        return
    result = run.heldout(stage_at(run.settings, run.progress.iteration))
    run.metrics.write(
        "eval",
        iteration=run.progress.iteration,
        consumed_samples=run.progress.consumed_samples,
        consumed_tokens=run.progress.consumed_tokens,
        lm_loss=result.loss,
        indexer_kl=result.indexer_kl,
        index_recall=result.index_recall,
        peak_memory_mb=_peak_memory_mb(run),
        skipped=run.progress.skipped,
        lm_loss_stderr=result.loss_stderr,
        base_lm_loss=result.base_loss,
        lm_loss_delta=result.delta,
        lm_loss_delta_stderr=result.delta_stderr,
        documents=result.documents,
        stage=run.state.stage,
    )
    _note(
        f"held out, iteration {run.progress.iteration}: loss {result.loss:.4f} +- {result.loss_stderr:.4f}, base "
        f"{result.base_loss:.4f}, difference {result.delta:+.4f} +- {result.delta_stderr:.4f} ({result.documents} documents)"
    )
    run.metrics.plot()


def _report_recall(run: Run) -> None:
    """What the base's indexers find, on the held-out batches."""
    if run.settings.steps.eval_interval:
        topk, save = run.identity.dsa.index_topk, run.settings.output.save
        rows, queries = measure_recall(run.model, run.state, run.heldout.batches, topk, run.device)
        report_recall(rows, queries, topk, run.progress.iteration, save)


def _report_skip(run: Run, failures: int) -> None:
    run.progress.skipped += 1
    run.metrics.write(
        "skip",
        iteration=run.progress.iteration,
        consumed_samples=run.progress.consumed_samples,
        consumed_tokens=run.progress.consumed_tokens,
        skipped=run.progress.skipped,
    )
    _note(
        f"iteration {run.progress.iteration}: loss or gradient is not finite; step skipped ({failures} in a row)"
    )


def _save(run: Run, *, background: bool = False) -> None:
    """Check that the base did not move, and that the ranks did not part, then write a checkpoint, or begin to."""
    run.saver.finish()  # before anything is copied beside what is still being written

    def check_frozen() -> None:  # by the writer: the whole base is hashed, and what does not move can be read at any time
        run.device.make_current()
        found = combined_sha256(frozen_hashes(run.model, run.identity.layer_pattern, run.experts))
        if found != run.frozen_here:
            raise RuntimeError(f"a frozen parameter or buffer moved: hash {found}, at the start {run.frozen_here}")

    if ranks.count() > 1:
        _, parted = merged_hashes(ranks.gather(trained_hashes(run.model, run.experts)))
        if parted:
            raise RuntimeError(f"ranks {parted[1]} and {parted[0]} must hold the same weights: they differ in {parted[2]}")
    snapshot = take_snapshot(
        run.settings.output.save,
        run.model,
        common_state(run.scheduler),
        run.identity,
        run.progress,
        run.layout,
        optimizer_tensors(pieces_of(run.model, run.optimizer, run.experts)),
        run.experts,
        copy=background,
    )
    run.saver.save(snapshot, check_frozen, background=background)
    with ranks.agreement():
        if ranks.is_main():
            atomic_write_text(run.settings.output.save / "frozen.sha256", run.identity.frozen_sha256 + "\n")


def _profile(run: Run) -> StepProfile:
    """Rank 0 profiles --profile-steps."""
    steps = run.settings.output.profile_range()
    with ranks.agreement():
        if steps is not None and steps[0] <= run.progress.iteration:
            raise UserError(
                f"--profile-steps must lie ahead: {steps[0]} <= {run.progress.iteration}, where the run resumes; move it"
            )
    return StepProfile(steps if ranks.is_main() else None, run.step, run.identity.layer_pattern, run.settings.output.save)
