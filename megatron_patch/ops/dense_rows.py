"""Attention of a block of queries over their selected keys through dense products, one head at a time: for short documents.

All keys up to the block's last query are multiplied, and those that a query has not selected masked away. Beside
`sparse_rows.py`, which computes the same of a block whose queries select a small part of their keys, and with its signatures.

Products go by tiles of keys, so that they have few shapes (`products.product` says why); what goes over all keys of a query, its
softmax, by tiles of queries that stay in a cache.

Shape letters: those of reference.py, and R queries of a block, C queries of a tile, K keys up to the block's last, L keys of a tile.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_patch.ops.masked import additive
from megatron_patch.ops.products import head, product, rounded
from megatron_patch.ops.reference import selection_mask, wide

TILE_ROWS, TILE_KEYS, KEYS_STEP = 128, 1024, 128  # the last tile of keys has a multiple of the last of these
BLOCK_BYTES = 8 * 2**20  # of a block's mask, which all heads share


def block_rows(keys: int, element_bytes: int) -> int:
    """How many queries a block has: whole tiles where the budget allows."""
    rows = BLOCK_BYTES // (keys * element_bytes)
    return max(1, rows - rows % TILE_ROWS if rows > TILE_ROWS else rows)


def _tiles(rows: int, keys: int) -> Iterator[tuple[slice, list[slice]]]:
    """(queries of the block, tiles of the keys that they may see): the block's queries are the last of the keys."""
    for first in range(0, rows, TILE_ROWS):
        last = min(first + TILE_ROWS, rows)
        seen = rounded(keys - rows + last, KEYS_STEP, keys)
        yield slice(first, last), [slice(k, min(k + TILE_KEYS, seen)) for k in range(0, seen, TILE_KEYS)]


def _regular(rows: int, keys: slice) -> bool:
    return rows == TILE_ROWS and (keys.stop - keys.start) % KEYS_STEP == 0


def _probabilities(query_CD: Tensor, key_KD: Tensor, mask_CK: Tensor, tiles: list[slice]) -> Tensor:
    """[C, K], K being the end of the last tile."""
    prob_CK = query_CD.new_empty(len(query_CD), tiles[-1].stop)
    for keys in tiles:
        logit_CL = product(query_CD, key_KD[keys], _regular(len(query_CD), keys))
        torch.add(logit_CL, mask_CK[:, keys], out=prob_CK[:, keys])
    return torch.softmax(prob_CK, -1, out=prob_CK)


def attend(
    query: Tensor, key: Tensor, value: Tensor, chosen_RS: Tensor, softmax_scale: float, out: Tensor
) -> Tensor:
    """`sparse_rows.attend` of a block of queries; `key` and `value` are the document's up to the block's last query."""
    dtype = wide(query[:0]).dtype
    mask_RK = additive(selection_mask(chosen_RS.long(), len(key)), dtype)
    sum_RK = torch.zeros_like(mask_RK)
    for h in range(query.shape[1]):
        scaled_RD, key_KD, value_KV = head(query, h) * softmax_scale, head(key, h), head(value, h)
        for rows, tiles in _tiles(*mask_RK.shape):
            prob_CK = _probabilities(scaled_RD[rows], key_KD, mask_RK[rows], tiles)
            out[rows, h] = sum(product(prob_CK[:, k], value_KV[k].T, _regular(len(prob_CK), k)) for k in tiles)
            sum_RK[rows, : prob_CK.shape[1]] += prob_CK
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
    """`sparse_rows.attention_gradients` of a block of queries; keys, as for `attend`."""
    d_query, d_key, d_value = into
    mask_RK = additive(selection_mask(chosen_RS.long(), len(key)), d_key.dtype)
    for h in range(query.shape[1]):
        scaled_RD, d_out_RV = head(query, h) * softmax_scale, head(d_out, h)
        key_KD, value_KV = head(key, h), head(value, h)
        for rows, tiles in _tiles(*mask_RK.shape):
            query_CD, d_out_CV = scaled_RD[rows], d_out_RV[rows]
            prob_CK = _probabilities(query_CD, key_KD, mask_RK[rows], tiles)
            d_logit_CK = torch.empty_like(prob_CK)
            for keys in tiles:
                regular, prob_CL = _regular(len(prob_CK), keys), prob_CK[:, keys]
                d_value[keys, h] += product(prob_CL.contiguous().T, d_out_CV.T, regular)
                torch.mul(product(d_out_CV, value_KV[keys], regular), prob_CL, out=d_logit_CK[:, keys])
            d_logit_CK.addcmul_(prob_CK, d_logit_CK.sum(-1, keepdim=True), value=-1)
            d_query_CD = torch.zeros_like(query_CD)
            for keys in tiles:
                regular, d_logit_CL = _regular(len(prob_CK), keys), d_logit_CK[:, keys].contiguous()
                d_key[keys, h] += product(d_logit_CL.T, query_CD.T, regular)
                d_query_CD += product(d_logit_CL, key_KD[keys].T, regular)
            d_query[rows, h] = d_query_CD.mul_(softmax_scale)
