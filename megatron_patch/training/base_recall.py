"""How much attention the base layers' indexers find: the mass inside their top-k, against three other selections.

For each query with more than k keys, the share of the dense attention's mass (mean over heads) inside k selected keys:
*indexer* its own choice, *random* the expectation over all sets of k keys (k / keys, exactly), *recent* the k newest keys,
*oracle* the k keys with the most mass, which no selection can exceed. Queries with fewer keys select all of them and say
nothing. `gap_closed` = (indexer - best) / (oracle - best), best being the better of random and recent.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from megatron_patch.data.batch import PackedBatch
from megatron_patch.devices import ranks
from megatron_patch.devices.device import Device
from megatron_patch.io.publish import atomic_write_json
from megatron_patch.model.builder import forward_pack
from megatron_patch.model.dsa_state import DsaState
from megatron_patch.model.indexer import IndexInputs
from megatron_patch.ops.reference import index_scores, select_topk, selection_mask, wide
from megatron_patch.training.step import sum_over_ranks

REPORT_FILE = "base_indexers.json"
SCHEMA = 1
SELECTIONS = ("indexer", "random", "recent", "oracle")
_CHUNK = 128  # queries at once: heads x 128 x keys numbers

# Shapes: N tokens of a document, C queries of a chunk, K keys up to the last of them, H heads.


@dataclass(frozen=True)
class LayerRecall:
    """Means over queries, of one layer."""

    layer: int
    indexer: float
    random: float
    recent: float
    oracle: float

    @property
    def gap_closed(self) -> float | None:
        """None where random or recent already find all there is."""
        best = max(self.random, self.recent)
        return (self.indexer - best) / (self.oracle - best) if self.oracle > best else None


def recalled_mass(
    query: Tensor, key: Tensor, index: IndexInputs, cu_seqlens: Tensor, softmax_scale: float, topk: int, counted: Tensor
) -> Tensor:
    """Sums over queries of the mass inside each of `SELECTIONS`, and the number of queries: fp64 [5].

    Args:
        query, key: [T, H, D], positions encoded.
        index: of the same tokens.
        cu_seqlens: int [n + 1].
        counted: bool [T]; other queries are left out, as are those with at most `topk` keys.
    """
    sums = torch.zeros(5, dtype=torch.float64, device=query.device)
    for begin, end in pairwise(cu_seqlens.tolist()):
        for first in range(begin + topk, end, _CHUNK):
            rows, keys = slice(first, min(first + _CHUNK, end)), slice(begin, min(first + _CHUNK, end))
            number_C = torch.arange(rows.start - begin + 1, rows.stop - begin + 1, device=query.device)  # of its keys
            number_K = torch.arange(1, keys.stop - keys.start + 1, device=query.device)
            causal_CK = number_K <= number_C[:, None]
            logit_HCK = torch.einsum("qhd,khd->hqk", wide(query[rows]), wide(key[keys])) * softmax_scale
            mass_CK = logit_HCK.masked_fill(~causal_CK, float("-inf")).softmax(-1).mean(0).double()
            score_CK = index_scores(index.query[rows], index.key[keys], index.weights[rows])
            chosen_CK = selection_mask(select_topk(score_CK.masked_fill(~causal_CK, float("-inf")), topk), len(number_K))
            recent_CK = causal_CK & (number_K > number_C[:, None] - topk)
            found = torch.stack(
                [
                    (mass_CK * chosen_CK).sum(-1),
                    topk / number_C.double(),
                    (mass_CK * recent_CK).sum(-1),
                    mass_CK.topk(topk).values.sum(-1),
                    torch.ones_like(number_C, dtype=torch.float64),
                ]
            )
            sums += (found * counted[rows]).sum(-1)
    return sums


@torch.no_grad()
def measure_recall(
    model: nn.Module, state: DsaState, batches: Iterable[PackedBatch], topk: int, device: Device
) -> tuple[list[LayerRecall], int]:
    """(each base layer's recall, queries with more than `topk` keys) over the held-out batches of all ranks."""
    sums: dict[int, Tensor] = {}

    def observe(layer: int, query: Tensor, key: Tensor, index: IndexInputs, cu_seqlens: Tensor, scale: float) -> None:
        found = recalled_mass(query, key, index, cu_seqlens, scale, topk, state.counted)
        sums[layer] = sums.get(layer, 0) + found

    training = model.training
    model.eval()
    state.observer = observe
    try:
        for cpu_batch in batches:
            batch = cpu_batch.to(device.torch_device)
            state.counted = batch.valid
            forward_pack(model, batch.tokens, batch.cu_seqlens, batch.labels)
    finally:
        state.observer = None
        model.train(training)
    rows, queries = [], 0
    for layer in sorted(sums):
        *masses, count = sum_over_ranks(sums[layer].tolist(), device)
        queries = int(count)
        if queries:
            rows.append(LayerRecall(layer, *(mass / count for mass in masses)))
    return rows, queries


def report_recall(rows: list[LayerRecall], queries: int, topk: int, iteration: int, save: Path) -> None:
    """Print the table and write `base_indexers.json`. Rank 0 alone writes.

    The file: `{"schema": 1, "iteration", "index_topk", "queries", "layers": [{"layer", "indexer", "random", "recent",
    "oracle", "gap_closed"}], "mean": {the same, without "layer"}}`; the mean is over layers, and its gap is of the means.
    """
    if not ranks.is_main():
        return
    if not rows:
        print(f"note: no held-out query has more than --index-topk {topk} keys: the base's indexers choose nothing there")
        return
    mean = LayerRecall(-1, *(sum(getattr(row, name) for row in rows) / len(rows) for name in SELECTIONS))
    named = [{"layer": row.layer, **_values(row)} for row in rows]
    content = {"schema": SCHEMA, "iteration": iteration, "index_topk": topk, "queries": queries}
    atomic_write_json(save / REPORT_FILE, content | {"layers": named, "mean": _values(mean)})
    table = Table(title=f"attention mass in {topk} selected keys, over {queries:,} held-out queries with more", title_justify="left")
    for column in ("layer", *SELECTIONS, "gap closed"):
        table.add_column(column, justify="right")
    for row in [*rows, mean]:
        closed = "-" if row.gap_closed is None else f"{row.gap_closed:.1%}"
        name = "mean" if row is mean else str(row.layer)
        table.add_row(name, *(f"{getattr(row, selection):.4f}" for selection in SELECTIONS), closed)
    Console().print(table)


def _values(row: LayerRecall) -> dict[str, float | None]:
    return {name: getattr(row, name) for name in SELECTIONS} | {"gap_closed": row.gap_closed}
