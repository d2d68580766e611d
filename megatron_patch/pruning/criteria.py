"""How experts are scored, and which are kept: the best of each layer, or of each group, with the lower id winning ties.

Suffixes: L MoE layers, E experts.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_patch.errors import UserError
from megatron_patch.pruning.statistics import SourceStatistics

CRITERIA = ("frequency", "gate_sum", "reap")


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


def parse_protected(entries: Iterable[str], layers: Iterable[int]) -> dict[int, set[int]]:
    """`LAYER:ID[,ID...]`, where LAYER is a MoE layer's number or `all`, as ids by layer.

    Raises:
        UserError: an entry is of another form, or names a layer without experts.
    """
    layers = tuple(layers)
    result: dict[int, set[int]] = {}
    for entry in entries:
        layer, colon, ids = entry.partition(":")
        try:
            numbers = {int(part) for part in ids.split(",")}
            chosen = layers if layer == "all" else (int(layer),)
        except ValueError:
            colon = ""
        if not colon:
            raise UserError(f"--protect must be LAYER:ID,ID or all:ID: {entry!r}; e.g. --protect 3:17,40 all:5")
        if not set(chosen) <= set(layers):
            raise UserError(
                f"--protect must name MoE layers: layer {layer} is none; they are {layers[0]} to {layers[-1]}"
            )
        for number in chosen:
            result.setdefault(number, set()).update(numbers)
    return result


def parse_weights(entries: Iterable[str]) -> dict[str, float] | None:
    """`SOURCE=WEIGHT` entries of --source-weights; None without any. `Statistics.combined` checks names and values.

    Raises:
        UserError: an entry is of another form.
    """
    weights: dict[str, float] = {}
    for entry in entries:
        name, _, value = entry.rpartition("=")
        try:
            weights[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise UserError(f"--source-weights must be SOURCE=WEIGHT: {entry!r}; e.g. --source-weights code=2 chat=0.5")
    return weights or None
