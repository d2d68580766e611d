"""The curves of a run that tell how it went, under the names that verl's releases give them; robust statistics for them.

Robust, since single steps of a healthy run stand out too: medians for levels, and for the noise the median absolute
difference between neighbours, which no trend inflates.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

CURVES: dict[str, tuple[str, ...]] = {
    "reward": ("critic/rewards/mean", "critic/score/mean"),
    "score_max": ("critic/score/max", "critic/rewards/max"),
    "score_min": ("critic/score/min", "critic/rewards/min"),
    "length": ("response_length/mean", "response_length_non_aborted/mean"),
    "clip_ratio": ("response_length/clip_ratio", "response_length_non_aborted/clip_ratio"),
    "entropy": ("actor/entropy", "actor/entropy_loss"),
    "grad_norm": ("actor/grad_norm",),
    "kl": ("actor/kl_loss", "actor/reward_kl_penalty", "critic/kl"),
    "ppo_kl": ("actor/ppo_kl",),
    "probs_diff_mean": ("training/rollout_probs_diff_mean",),
    "probs_diff_std": ("training/rollout_probs_diff_std",),
    "probs_diff_max": ("training/rollout_probs_diff_max",),
    "rollout_k3": ("rollout_corr/k3_kl", "mismatch/mismatch_k3_kl"),
    "step_time": ("perf/time_per_step", "timing_s/step"),
}
"""Curve -> metrics, the first one that a run has is taken."""

# Parts of timing_s/step that only some steps have, at the user's wish.
_OCCASIONAL = ("timing_s/testing", "timing_s/save_checkpoint")
VALIDATION = ("val-core/", "val/test_score/")


class NotTestedError(Exception):
    """A symptom cannot be looked for; the message says why."""


@dataclass(frozen=True)
class Curve:
    """The finite values of one metric."""

    metric: str
    steps: NDArray[np.int64]
    values: Values

    def __len__(self) -> int:
        return len(self.values)

    def at(self, which: NDArray) -> tuple[list[int], list[float]]:
        """Steps and values at a mask or at indices, as plain numbers."""
        return [int(step) for step in self.steps[which]], [float(value) for value in self.values[which]]


def find_metric(rows: Mapping[int, Mapping[str, float]], name: str) -> str | None:
    """The metric that stands for the curve `name` in a run."""
    there = {metric for row in rows.values() for metric in row}
    return next((metric for metric in CURVES[name] if metric in there), None)


def metric_curve(rows: Mapping[int, Mapping[str, float]], metric: str) -> Curve:
    """Steps where `metric` was logged and is finite."""
    points = [(step, row[metric]) for step, row in rows.items() if np.isfinite(row.get(metric, np.nan))]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return Curve(metric, np.array(steps, np.int64), np.array(values, np.float64))


def curve(rows: Mapping[int, Mapping[str, float]], name: str, at_least: int = 1) -> Curve:
    """The curve `name` of `CURVES`.

    Raises:
        NotTestedError: the run has none of its metrics, or fewer than `at_least` finite values.
    """
    metric = find_metric(rows, name)
    if metric is None:
        raise NotTestedError(f"not logged: {' or '.join(CURVES[name])}")
    found = metric_curve(rows, metric)
    if len(found) < at_least:
        raise NotTestedError(f"{metric} has {len(found)} finite values, {at_least} are needed")
    return found


def work_time(rows: Mapping[int, Mapping[str, float]], at_least: int) -> Curve:
    """Step time without validation and saving, which make some steps long in every healthy run."""
    whole = curve(rows, "step_time", at_least)
    extra = [sum(rows[int(step)].get(part, 0.0) for part in _OCCASIONAL) for step in whole.steps]
    return Curve(whole.metric, whole.steps, np.maximum(whole.values - np.array(extra), 0.0))


def noise(values: Values) -> float:
    """Standard deviation of the step-to-step noise, from the median absolute difference of neighbours.

    1.4826 turns a Gaussian's median absolute deviation into its standard deviation; a difference of two has sqrt(2) of it.
    """
    return float(1.4826 * np.median(np.abs(np.diff(values))) / np.sqrt(2)) if len(values) > 1 else 0.0


def median_error(sigma: float, count: int) -> float:
    """Standard error of the difference between two medians of `count` values each, of Gaussian noise `sigma`."""
    return sigma * np.sqrt(np.pi / 2) * np.sqrt(2 / count)


def rolling_median(values: Values, width: int) -> Values:
    """Median over a centred window; at the ends over the part of it that exists. Same length as `values`."""
    half, n = width // 2, len(values)
    result = np.array([np.median(values[max(0, i - half) : i + half + 1]) for i in range(min(half, n))])
    if n > 2 * half:
        inner = np.median(np.lib.stride_tricks.sliding_window_view(values, 2 * half + 1), axis=1)
        result = np.concatenate([result, inner])
    return np.append(result, [np.median(values[max(0, i - half) :]) for i in range(len(result), n)])


def turning_points(values: Values, size: float) -> list[int]:
    """Indices of the highs and lows between which `values` moves by at least `size`, alternating, ends left out."""
    points: list[int] = []
    low = high = 0
    direction = 0  # +1: rising since the last low
    for i, value in enumerate(values):
        if value > values[high]:
            high = i
        if value < values[low]:
            low = i
        if direction >= 0 and values[high] - value >= size:
            points += [high] if direction or high else []
            direction, low, high = -1, i, i
        elif direction <= 0 and value - values[low] >= size:
            points += [low] if direction or low else []
            direction, low, high = 1, i, i
    return points


def autocorrelation(values: Values, most: int) -> Values:
    """Correlation of `values` with itself at lags 0 to `most`, after a parabola was taken out as its trend."""
    x = np.linspace(-1, 1, len(values))
    rest = values - np.polyval(np.polyfit(x, values, 2), x)
    power = float(rest @ rest)
    if power <= 1e-12 * max(float(values @ values), 1e-30):
        return np.zeros(most + 1)
    return np.array([float(rest[: len(rest) - lag] @ rest[lag:]) for lag in range(most + 1)]) / power
