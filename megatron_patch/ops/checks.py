"""What every implementation of the DSA op refuses: inputs that its maths would silently broadcast, or attend wrongly."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class DsaSizes:
    """What a backend may be unable to take of a model: heads of this rank, MLA's latent and RoPE dimensions, the indexer's
    heads, their size and top-k, and the dtype of weights and activations."""

    heads: int
    latent_dim: int
    rope_dim: int
    index_heads: int
    index_dim: int
    topk: int
    dtype: torch.dtype


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    index_weights: Tensor,
    cu_seqlens: Tensor,
    topk: int,
    stage: str,
    counted: Tensor | None,
) -> list[int]:
    """Refuse what the maths would silently broadcast; returns `cu_seqlens` as a list."""
    if query.dim() != 3 or key.shape != query.shape or value.dim() != 3 or value.shape[:2] != query.shape[:2]:
        raise ValueError(
            "query and key must be [T, H, D] and value [T, H, V]: "
            f"got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    t = query.shape[0]
    if index_query.dim() != 3 or index_key.dim() != 2 or index_weights.dim() != 2:
        wrong = True
    else:
        heads, dims = index_query.shape[1:]
        wrong = index_query.shape[0] != t or index_key.shape != (t, dims) or index_weights.shape != (t, heads)
    if wrong:
        raise ValueError(
            f"index_query must be [T, J, E], index_key [T, E], index_weights [T, J] with T = {t}: "
            f"got {tuple(index_query.shape)}, {tuple(index_key.shape)}, {tuple(index_weights.shape)}"
        )
    if not all(x.is_floating_point() for x in (query, key, value, index_query, index_key)):
        raise ValueError("query, key, value, index_query and index_key must be floating point")
    if index_weights.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"index_weights must be float32: got {index_weights.dtype}; index scores are not rounded")
    if counted is not None and (counted.shape != (t,) or counted.dtype != torch.bool):
        raise ValueError(f"counted must be bool [T] with T = {t}: got {_form(counted)}")
    if topk < 1:
        raise ValueError(f"topk must be at least 1: got {topk}")
    if stage not in ("dense", "sparse"):
        raise ValueError(f"stage must be 'dense' or 'sparse': got {stage!r}")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in _INTEGERS or t == 0:
        raise ValueError(f"cu_seqlens must be int32 [n + 1] and T > 0: got {_form(cu_seqlens)}, T = {t}")
    ends = cu_seqlens.tolist()
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != t or any(b < a for a, b in pairwise(ends)):
        raise ValueError(f"cu_seqlens must start at 0, never decrease and end at T = {t}: got {ends[:8]}")
    return ends


def check_selection(indices: Tensor, cu_seqlens: Tensor) -> None:
    """A forced selection must be causal, inside the document, ascending, -1 at the tail, and never empty."""
    t = int(cu_seqlens[-1])
    if indices.dim() != 2 or indices.shape[0] != t or indices.shape[1] < 1 or indices.dtype not in _INTEGERS:
        raise ValueError(f"indices must be int32 [T, S] with T = {t}: got {_form(indices)}")
    position_T = torch.arange(t, device=indices.device)
    last_document_begin = torch.searchsorted(cu_seqlens.to(indices.device).long(), position_T, right=True) - 1
    begin_T1 = cu_seqlens.to(indices.device)[last_document_begin][:, None]
    used_TS = indices >= 0
    outside = used_TS & ((indices < begin_T1) | (indices > position_T[:, None]))
    if bool(outside.any()):
        row = int(outside.any(1).nonzero()[0])
        keys = indices[row].tolist()[:8]
        raise ValueError(f"a selected key is in the future or in another document: query {row} has {keys}")
    ascending = (indices[:, 1:] > indices[:, :-1]) | (indices[:, 1:] == -1)
    if not bool(used_TS[:, 0].all() and ascending.all() and (indices >= -1).all()):
        raise ValueError("each row of indices must be ascending and distinct, -1 only at the tail, one key at least")


def _form(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"
