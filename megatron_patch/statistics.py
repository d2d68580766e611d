"""Means over independent rows or documents, with their standard errors."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error, which is NaN when there is one row only."""

    value: float
    stderr: float


def mean(values: Tensor) -> Estimate:
    """Mean over rows [n]; standard error = sample standard deviation / sqrt(n)."""
    return ratio(values, torch.ones_like(values))


def ratio(above: Tensor, below: Tensor) -> Estimate:
    """sum(above) / sum(below) over the same rows or documents, with the ratio estimator's error (delta method).

    For a loss per token: each document's summed loss, and its number of tokens. (Tokens of one document depend on each
    other; documents are the independent draws.) For model / base: each row's score by the two.

    Args:
        above, below: [n]; `below` sums to more than 0.
    """
    above, below = above.double(), below.double()
    value, n = float(above.sum() / below.sum()), above.numel()
    if n < 2:
        return Estimate(value, math.nan)
    residual = above - value * below
    return Estimate(value, float(residual.std(correction=1) / below.mean() / math.sqrt(n)))


def or_none(value: float) -> float | None:
    """JSON has no NaN: null stands for it."""
    return value if math.isfinite(value) else None
