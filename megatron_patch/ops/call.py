"""The arguments of the DSA op that have no gradient, checked once for every implementation that works through a document."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_patch.ops.checks import check_inputs, check_selection
from megatron_patch.ops.reference import Stage


@dataclass(frozen=True)
class Call:
    """`ends` is cu_seqlens, `slots` the width of the selection."""

    ends: list[int]
    slots: int
    softmax_scale: float
    sparse: bool
    counted_T: Tensor | None
    forced_TS: Tensor | None  # positions in the pack
    recall: bool
    attention_learns: bool
    indexer_learns: bool

    @property
    def documents(self) -> list[slice]:
        """Those that have a token."""
        return [slice(begin, end) for begin, end in pairwise(self.ends) if begin < end]


def accept(
    attention: tuple[Tensor, Tensor, Tensor],
    index: tuple[Tensor, Tensor, Tensor],
    cu_seqlens: Tensor,
    topk: int,
    softmax_scale: float,
    stage: Stage,
    counted: Tensor | None,
    indices: Tensor | None,
    recall: bool,
) -> Call:
    """The arguments of `reference.dsa_attention`, refused as there.

    Args:
        attention: query, key and value.
        index: index_query, index_key and index_weights.
    """
    ends = check_inputs(*attention, *index, cu_seqlens, topk, stage, counted)
    if indices is not None:
        check_selection(indices, cu_seqlens)
    longest = max(end - begin for begin, end in pairwise(ends))
    recorded = torch.is_grad_enabled()
    return Call(
        ends=ends,
        slots=min(topk, longest) if indices is None else indices.shape[1],
        softmax_scale=softmax_scale,
        sparse=stage == "sparse",
        counted_T=counted,
        forced_TS=indices,
        recall=recall,
        attention_learns=recorded and any(x.requires_grad for x in attention),
        indexer_learns=recorded and any(x.requires_grad for x in index),
    )
