"""Attention of a block of queries over their selected keys through dense products, one head at a time: for short documents.

All keys up to the block's last query are multiplied, and those that a query has not selected masked away. Beside
`sparse_rows.py`, which computes the same of a block whose queries select a small part of their keys, and with its signatures.

Shape letters: those of reference.py, and R queries of a block, C queries of a tile, K keys up to the block's last.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_patch.ops.masked import additive
from megatron_patch.ops.products import head, product
from megatron_patch.ops.reference import selection_mask, wide

TILE_BYTES = 4 * 2**20  # of one head's logits at once, which several passes go over
BLOCK_BYTES = 8 * 2**20  # of a block's mask, which all heads share


def block_rows(keys: int, element_bytes: int) -> int:
    """How many queries a block has."""
    return max(1, BLOCK_BYTES // (keys * element_bytes))


def _tiles(rows: int, keys: int, element_bytes: int) -> Iterator[tuple[slice, int]]:
    """(queries of the block, keys that they may see): the block's queries are its last."""
    step = max(1, min(rows, TILE_BYTES // (keys * element_bytes)))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        yield slice(first, last), keys - rows + last


def attend(
    query: Tensor, key: Tensor, value: Tensor, chosen_RS: Tensor, softmax_scale: float, out: Tensor
) -> Tensor:
    """Attention of a block of queries.

    Args:
        query: [R, H, D].
        key, value: [K, H, D] and [K, H, V]: of the document, up to the block's last query.
        chosen_RS: int32 [R, S], positions in the document, -1 at the tail.
        out: [R, H, V], written.

    Returns:
        p [R, S], the probabilities summed over heads and normalised; zero at the tail.
    """
    dtype = wide(query[:0]).dtype
    mask_RK = additive(selection_mask(chosen_RS.long(), len(key)), dtype)
    sum_RK = torch.zeros_like(mask_RK)
    tiles = list(_tiles(*mask_RK.shape, dtype.itemsize))
    for h in range(query.shape[1]):
        scaled_RD, key_KD, value_KV = head(query, h) * softmax_scale, head(key, h), head(value, h)
        for rows, seen in tiles:
            prob_CK = product(scaled_RD[rows], key_KD[:seen]).add_(mask_RK[rows, :seen])
            torch.softmax(prob_CK, -1, out=prob_CK)
            out[rows, h] = product(prob_CK, value_KV[:seen].T)
            sum_RK[rows, :seen] += prob_CK
    target_RS = sum_RK.gather(1, chosen_RS.clamp(min=0).long()).masked_fill_(chosen_RS < 0, 0.0)
    return target_RS.div_(target_RS.sum(-1, keepdim=True))


def attention_gradients(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chosen_RS: Tensor,
    softmax_scale: float,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Gradients of a block of queries.

    Args:
        d_out: [R, H, V].
        query, key, value, chosen_RS: as for `attend`.
        into: d_query [R, H, D], written in its dtype; d_key [K, H, D] and d_value [K, H, V], wide, added to.
    """
    d_query, d_key, d_value = into
    mask_RK = additive(selection_mask(chosen_RS.long(), len(key)), d_key.dtype)
    tiles = list(_tiles(*mask_RK.shape, d_key.element_size()))
    for h in range(query.shape[1]):
        scaled_RD, d_out_RV = head(query, h) * softmax_scale, head(d_out, h)
        key_KD, value_KV = head(key, h), head(value, h)
        for rows, seen in tiles:
            prob_CK = product(scaled_RD[rows], key_KD[:seen]).add_(mask_RK[rows, :seen])
            torch.softmax(prob_CK, -1, out=prob_CK)
            d_value[:seen, h] += product(prob_CK.T, d_out_RV[rows].T)
            d_logit_CK = product(d_out_RV[rows], value_KV[:seen]).mul_(prob_CK)
            d_logit_CK.addcmul_(prob_CK, d_logit_CK.sum(-1, keepdim=True), value=-1)
            d_key[:seen, h] += product(d_logit_CK.T, scaled_RD[rows].T)
            d_query[rows, h] = product(d_logit_CK, key_KD[:seen].T).mul_(softmax_scale)
