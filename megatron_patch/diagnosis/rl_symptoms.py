"""The symptoms: each is one function that looks at a run's curves and says what it found, with steps, values, threshold.

Every threshold is a named constant with its reason. They are set so that the noise of a healthy run does not reach them;
tests/diagnosis/test_rl_symptoms.py holds them against hundreds of simulated runs, healthy and ill.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_patch.diagnosis.rl_curves import (
    NotTestedError,
    autocorrelation,
    curve,
    median_error,
    noise,
    rolling_median,
    turning_points,
    work_time,
)

Rows = Mapping[int, Mapping[str, float]]

# A level is the median over a quarter of the run; shorter runs have quarters whose medians are mostly noise.
LEVEL_STEPS = 40
# Two levels differ if they do by 4 standard errors (chance: 3e-5) and by half the noise of a step: in a very long run
# a difference that nobody could see on the curve would else be called a rise.
RISE_ERRORS, RISE_NOISE = 4.0, 0.5
# Within a tenth of the best possible score nothing is left to learn: flat there is success.
CEILING = 0.9
# A fall from the best level is judged at more errors, since the best of several levels is high by chance.
FALL_ERRORS, FALL_NOISE = 7.0, 2.0
# A swing moves the smoothed reward by 6 times the step noise (smoothing leaves about half of that noise) and by
# 0.4 of all that the reward ever moved; four of them are two cycles, fewer may be one setback.
SWING_NOISE, SWING_SHARE, SWINGS = 6.0, 0.4, 4
# A fast oscillation looks like noise from step to step but repeats itself: correlation above 0.5 at some lag, after an
# opposite phase below -0.3. Independent noise over 60 steps has 0.13 of either by chance. Three cycles must fit.
CYCLE_STEPS, CYCLE_PEAK, CYCLE_TROUGH, CYCLES = 60, 0.5, -0.3, 3
# The start is the first 10 steps: warm-up is over and Adam's second moments are filled (1 / (1 - 0.9) steps).
START, START_STEPS = 10, 20
# Ten times the later median is beyond any warm-up; 20 in absolute terms since verl clips at 1.0, and a gradient that merely
# fades with the reward's saturation (0.3 to 0.01) is no fault. Two steps must be there; one alone counts from 50 times on.
START_RATIO, START_FLOOR, START_RATIO_ALONE = 10.0, 20.0, 50.0
# Mean |p_rollout - p_trainer| of a token. bf16 against bf16 gives 0.002 to 0.007; above 0.01 the two compute other things.
MISMATCH = 0.01
# Where only the k3 estimate of the KL is logged: bf16 gives about 0.001 nats.
MISMATCH_K3 = 0.01
# A batch of odd prompts may pass the threshold: 3 steps and 5% of them must, or 3 must pass twice the threshold.
MISMATCH_STEPS, MISMATCH_SHARE, MISMATCH_FAR = 3, 0.05, 2.0
# Mismatch grows a little with the length of answers; half as much again, quarter by quarter, is a drift. Releases that
# log three decimals turn 0.0014 to 0.0016 into 0.001 to 0.002: more than one last digit is needed.
DRIFT_RATIO, DRIFT_ERRORS, DRIFT_LEAST = 1.5, 6.0, 0.0012
# RL lowers entropy to a half or a third. Below 15% of the start and 0.05 nats nearly every token is certain, and the group
# of answers to one prompt has no spread to learn from.
ENTROPY_SHARE, ENTROPY_NATS, ENTROPY_STEPS = 0.15, 0.05, 20
# Reasoning runs grow their answers 2 to 4 times over hundreds of steps; 2.5 times within 30 steps, and by 50 tokens, is
# a policy that no longer stops.
LENGTH_RATIO, LENGTH_WINDOW, LENGTH_TOKENS, LENGTH_STEPS = 2.5, 30, 50.0, 15
# With half of the answers cut at the limit, the reward of most is about the limit and not about the answer.
CLIP_RATIO, CLIP_STEPS = 0.5, 5
# Three times the steps around it, validation and saving taken out, and 10 times their spread; the first 3 compile and
# fill caches. One such step is an accident of the cluster.
SLOW_RATIO, SLOW_SPREAD, SLOW_WINDOW, SLOW_START, SLOW_STEPS, SLOW_COUNT = 3.0, 10.0, 21, 3, 20, 2
# What a NaN of counts; a val-* or timing metric may be undefined in a healthy run.
FINITE = ("actor/", "critic/", "training/rollout_", "rollout_corr/", "mismatch/", "response_length")


@dataclass(frozen=True)
class Symptom:
    """What a detector found."""

    metric: str
    steps: list[int]
    values: list[float]
    threshold: float
    rule: str
    """The threshold in words."""
    text: str
    """What happened, in one sentence."""


def non_finite(rows: Rows) -> Symptom | None:
    """NaN or inf in a metric of the actor, the critic, the rollout or the lengths"""
    bad: dict[str, list[tuple[int, float]]] = {}
    for step, row in rows.items():
        for name, value in row.items():
            if name.startswith(FINITE) and not np.isfinite(value):
                bad.setdefault(name, []).append((step, value))
    if not bad:
        return None
    metric, points = min(bad.items(), key=lambda item: (item[1][0][0], item[0]))
    steps, values = (list(each) for each in zip(*points, strict=True))
    others = f", and of {len(bad) - 1} other metrics" if len(bad) > 1 else ""
    text = f"{len(steps)} values of {metric}{others} are not finite, from step {steps[0]} on"
    return Symptom(metric, steps, values, 0.0, "every value is finite", text)


def reward_flat(rows: Rows) -> Symptom | None:
    """The reward never rises above its start"""
    c = curve(rows, "reward", LEVEL_STEPS)
    quarter = len(c) // 4
    sigma, end = noise(c.values), float(np.median(c.values[-quarter:]))
    # Against a short start too: a reward that rises within the first tenth has no rise left between quarters.
    for size in (quarter, max(5, len(c) // 20)):
        least = max(RISE_ERRORS * median_error(sigma, size), RISE_NOISE * sigma)
        start = float(np.median(c.values[:size]))
        if end - start > least:
            return None
    if _at_ceiling(rows, end) or _fall(rows) is not None or reward_oscillating(rows) is not None:
        return None
    start = float(np.median(c.values[:quarter]))
    text = f"the median of the first quarter is {start:.4g}, of the last {end:.4g}; a rise beyond noise is {least:.2g}"
    steps, values = c.at(np.array([0, len(c) // 2, len(c) - 1]))
    return Symptom(c.metric, steps, values, least, "last level - first level above 4 standard errors", text)


def _at_ceiling(rows: Rows, level: float) -> bool:
    """Is the reward as good as it can be? Only known where its range is logged."""
    try:
        best, worst = (float(np.median(curve(rows, name).values)) for name in ("score_max", "score_min"))
    except NotTestedError:
        return False
    return level > 0 and level >= CEILING * best and (best > worst or level == best)


def _fall(rows: Rows) -> tuple[int, float, float, float] | None:
    """Index of the best level, that level, the last one, and the fall that noise does not explain; None without one."""
    values = curve(rows, "reward", LEVEL_STEPS).values
    quarter, sigma = len(values) // 4, noise(values)
    levels = np.median(np.lib.stride_tricks.sliding_window_view(values, quarter), axis=1)
    best = int(np.argmax(levels))
    least = max(FALL_ERRORS * median_error(sigma, quarter), FALL_NOISE * sigma)
    fell = levels[best] - levels[-1] > least
    return (best + quarter // 2, float(levels[best]), float(levels[-1]), least) if fell else None


def reward_fall(rows: Rows) -> Symptom | None:
    """The reward ends below the best level it had"""
    c, fall = curve(rows, "reward", LEVEL_STEPS), _fall(rows)
    if fall is None or reward_oscillating(rows) is not None:  # one phase of an oscillation is no fall
        return None
    top, best, end, least = fall
    steps, values = c.at(np.array([top, len(c) - 1]))
    text = f"the best level is {best:.4g} around step {steps[0]}, the last quarter has {end:.4g}"
    return Symptom(c.metric, steps, values, least, "best level - last level below 7 standard errors", text)


def reward_oscillating(rows: Rows) -> Symptom | None:
    """The reward swings up and down, far beyond its noise"""
    c = curve(rows, "reward", LEVEL_STEPS)
    smooth = rolling_median(c.values, 5)
    low, high = np.percentile(smooth, [5, 95])
    size = max(SWING_NOISE * noise(c.values), SWING_SHARE * float(high - low))
    points = turning_points(smooth, size) if size > 0 else []
    if len(points) >= SWINGS:
        steps, values = c.at(np.array(points))
        text = f"{len(points)} turns with swings of at least {size:.3g} between them"
        return Symptom(c.metric, steps, values, size, f"fewer than {SWINGS} swings of that size", text)
    if len(c) < CYCLE_STEPS:
        return None
    r = autocorrelation(c.values, len(c) // CYCLES)
    trough = next((lag for lag in range(1, len(r)) if r[lag] < CYCLE_TROUGH), None)
    if trough is None or (peak := trough + int(np.argmax(r[trough:]))) < 2 or r[peak] <= CYCLE_PEAK:
        return None
    steps, values = c.at(np.arange(0, len(c), max(1, peak // 2)))
    text = f"it repeats itself every {peak} steps (correlation {r[peak]:.2f})"
    return Symptom(c.metric, steps, values, CYCLE_PEAK, "correlation with itself below 0.5 at every lag", text)


def grad_norm_start(rows: Rows) -> Symptom | None:
    """grad_norm is far above its later median in the first steps"""
    c = curve(rows, "grad_norm", START_STEPS)
    half = max(START, len(c) // 2)  # a bad start that lasts longer than 10 steps must not raise the later median
    later = float(np.median(c.values[half:]))
    limit = max(START_RATIO * later, START_FLOOR)
    high = c.values > limit
    alone = c.values[:START].max() > max(START_RATIO_ALONE * later, START_FLOOR)
    if high[:START].sum() < 2 and not alone:
        return None
    high[half:] = False
    steps, values = c.at(high)
    text = f"up to {max(values):.4g} in {len(steps)} steps until step {steps[-1]}, later median {later:.4g}"
    return Symptom(c.metric, steps, values, limit, "below 10 times the later median, or below 20", text)


def mismatch(rows: Rows) -> Symptom | None:
    """Rollout engine and trainer give the same tokens different probabilities"""
    c, limit = _mismatch_curve(rows, 1)
    high, need = c.values > limit, min(MISMATCH_STEPS, len(c))
    if high.sum() < max(need, MISMATCH_SHARE * len(c)) and (c.values > MISMATCH_FAR * limit).sum() < need:
        return None
    steps, values = c.at(high)
    text = f"{len(steps)} of {len(c)} steps are above {limit:g}, the worst {max(values):.4g}"
    return Symptom(
        c.metric, steps, values, limit, "fewer than 5% of steps above it, or 3; fewer than 3 above twice of it", text
    )


def _mismatch_curve(rows: Rows, at_least: int):
    """The mean difference of probabilities, or the k3 of the KL where verl works without the former (bypass mode)."""
    try:
        return curve(rows, "probs_diff_mean", at_least), MISMATCH
    except NotTestedError as first:
        try:
            return curve(rows, "rollout_k3", at_least), MISMATCH_K3
        except NotTestedError as second:
            raise NotTestedError(f"{first}; {second}") from None


def mismatch_drift(rows: Rows) -> Symptom | None:
    """The mismatch between rollout and trainer grows slowly"""
    c, _ = _mismatch_curve(rows, LEVEL_STEPS)
    levels = [float(np.median(part)) for part in np.array_split(c.values, 4)]
    error = median_error(noise(c.values), len(c) // 4)
    limit = max(DRIFT_RATIO * levels[0], levels[0] + max(DRIFT_ERRORS * error, DRIFT_LEAST))
    if not (levels[3] > limit and levels == sorted(levels)):
        return None
    middles = np.array([int((i + 0.5) * len(c) / 4) for i in range(4)])
    text = "medians of the quarters: " + ", ".join(f"{level:.3g}" for level in levels)
    return Symptom(c.metric, c.at(middles)[0], levels, limit, "last quarter below 1.5 times the first", text)


def entropy_collapse(rows: Rows) -> Symptom | None:
    """The policy's entropy falls to almost nothing"""
    c = curve(rows, "entropy", ENTROPY_STEPS)
    start = float(np.median(c.values[: max(5, len(c) // 20)]))
    end = float(np.median(c.values[-max(5, len(c) // 10) :]))
    limit = min(ENTROPY_SHARE * start, ENTROPY_NATS)
    if end >= limit:
        return None
    below = np.flatnonzero(rolling_median(c.values, 5) < limit)
    steps, values = c.at(below)
    text = f"from {start:.4g} to {end:.4g} nats, below {limit:.3g} since step {steps[0]}"
    return Symptom(c.metric, steps, values, limit, "above 15% of the start, or above 0.05 nats", text)


def length_explosion(rows: Rows) -> Symptom | None:
    """Answers grow by a multiple within a few steps"""
    c = curve(rows, "length", LENGTH_STEPS)
    smooth = rolling_median(c.values, 5)
    before = smooth[np.maximum(np.arange(len(c)) - LENGTH_WINDOW, 0)]
    high = (smooth > LENGTH_RATIO * before) & (smooth > before + LENGTH_TOKENS)
    if not high.any():
        return None
    first = int(np.flatnonzero(high)[0])
    steps, values = c.at(high)
    text = (
        f"from {before[first]:.4g} to {smooth[first]:.4g} tokens within {LENGTH_WINDOW} steps, up to {max(values):.4g}"
    )
    return Symptom(
        c.metric, steps, values, LENGTH_RATIO, f"below 2.5 times the length {LENGTH_WINDOW} steps before", text
    )


def clip_ratio(rows: Rows) -> Symptom | None:
    """Most answers are cut at the length limit"""
    c = curve(rows, "clip_ratio")
    need = min(CLIP_STEPS, len(c))
    high = c.values >= CLIP_RATIO
    # Steps that belong to a row of at least `need` such steps.
    runs = np.convolve(high, np.ones(need, int), "valid") == need
    member = np.convolve(runs, np.ones(need, int)) > 0
    if not member.any():
        return None
    steps, values = c.at(member)
    text = f"{len(steps)} steps cut at least half of the answers, up to {max(values):.0%}"
    return Symptom(
        c.metric, steps, values, CLIP_RATIO, f"below 0.5, or for fewer than {CLIP_STEPS} steps in a row", text
    )


def step_time(rows: Rows) -> Symptom | None:
    """Single steps take a multiple of the time of their neighbours"""
    c = work_time(rows, SLOW_STEPS)
    around = rolling_median(c.values, SLOW_WINDOW)
    spread = 1.4826 * float(np.median(np.abs(c.values - around)))
    slow = (c.values > SLOW_RATIO * around) & (c.values > around + SLOW_SPREAD * spread) & (around > 0)
    slow[:SLOW_START] = False
    if slow.sum() < SLOW_COUNT:
        return None
    steps, values = c.at(slow)
    text = f"{len(steps)} steps of up to {max(values):.4g} s, median {np.median(c.values):.4g} s"
    return Symptom(c.metric, steps, values, SLOW_RATIO, "below 3 times the 21 steps around it", text)


DETECTORS: dict[str, Callable[[Rows], Symptom | None]] = {
    each.__name__: each
    for each in (
        non_finite,
        grad_norm_start,
        mismatch,
        mismatch_drift,
        reward_flat,
        reward_fall,
        reward_oscillating,
        entropy_collapse,
        length_explosion,
        clip_ratio,
        step_time,
    )
}
"""Symptom's id -> its detector, whose docstring is its title."""


def title(name: str) -> str:
    """What a symptom's id means."""
    return (DETECTORS[name].__doc__ or "").strip()


def examine(rows: Rows) -> tuple[dict[str, Symptom], dict[str, str]]:
    """Look for every symptom.

    Returns:
        What was found, by id; and why the others could not be looked for, by id.
    """
    found: dict[str, Symptom] = {}
    not_tested: dict[str, str] = {}
    for name, detector in DETECTORS.items():
        try:
            symptom = detector(rows)
        except NotTestedError as reason:
            not_tested[name] = str(reason)
            continue
        if symptom is not None:
            found[name] = symptom
    return found, not_tested
