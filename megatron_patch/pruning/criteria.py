"""How experts are scored, and which are kept: the best of each layer, or of each group, with the lower id winning ties.

Suffixes: L MoE layers, E experts.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_patch.errors import UserError
from megatron_patch.pruning.statistics import SourceStatistics
from megatron_patch.pruning.wish import CRITERIA


def scores(statistics: SourceStatistics, criterion: str) -> Tensor:
    """A score for each expert; more is better, an expert that was never routed to has 0.

    Args:
        statistics: counts and sums, [L, E].
        criterion: "frequency": times chosen. "gate_sum": sum of routing weights. "reap": mean over its tokens of
            weight * ||expert output|| (Router-weighted Expert Activation Pruning, arXiv 2510.13999).

    Returns:
        float64 [L, E].

    Raises:
        UserError: an unknown criterion, or one that the statistics have no sums for.
    """
    if criterion not in CRITERIA:
        raise UserError(f"--criterion must be one of {', '.join(CRITERIA)}: {criterion!r}; give one of them")
    count_LE = statistics.count.to(torch.float64)
    if criterion == "frequency":
        return count_LE
    sums_LE = statistics.gate_sum if criterion == "gate_sum" else statistics.gate_norm_sum
    sums_LE = sums_LE.to(torch.float64)
    if not sums_LE.isfinite().all():
        raise UserError(
            f"--criterion {criterion} needs routing weights, and these statistics have counts only (recorded expert ids, "
            "or a value that is not finite); use --criterion frequency, or observe through transformers"
        )
    if criterion == "gate_sum":
        return sums_LE
    return torch.where(count_LE > 0, sums_LE / count_LE.clamp(min=torch.finfo(torch.float64).tiny), 0.0)


def select(score_E: Tensor, keep: int, n_group: int = 1, protected: Iterable[int] = ()) -> list[int]:
    """The experts of a layer to keep, ascending.

    Args:
        score_E: scores [E].
        keep: how many; a multiple of `n_group`.
        n_group: contiguous groups, of each of which the same number is kept.
        protected: experts that are kept whatever their score.
    """
    protected = set(protected)
    size, room = len(score_E) // n_group, keep // n_group
    values = score_E.tolist()
    kept: list[int] = []
    for group in range(n_group):
        members = range(group * size, (group + 1) * size)
        kept += sorted(members, key=lambda e: (e not in protected, -values[e], e))[:room]
    return sorted(kept)
