"""The lightning indexer by itself: which keys each query takes, and the gradients that its KL sends back through them.

The score product is the dearest of the op. It is made in tiles that stay in a CPU's caches, so that relu and the sum over index
heads read no memory; of all scores only those of the chosen keys are kept. The gradients make the products again, of late
queries with the chosen keys alone.

Shape letters: those of reference.py, and C queries of a chunk, K keys up to the last of them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_patch.ops.products import product, rounded
from megatron_patch.ops.reference import select_topk, wide

TILE_BYTES = 2 * 2**20  # of products before the sum over index heads
TILE_KEYS, KEYS_STEP = 2048, 256  # fewer where the queries fill the tile; the last tile has a multiple of the second
# In the backward pass a query whose position is below this times top-k multiplies all keys up to its own instead of gathering the
# chosen ones. Measured at 32 x 128 index heads: such a pair takes 185 ns, a chosen one 400 ns.
MASKED_POSITIONS = 2.2
CHUNK_PRODUCTS = 512  # rows of a product: queries times index heads
SCORE_BYTES = 8 * 2**20  # of one chunk's scores
BACKWARD_BYTES = 3 * 2**19  # of one chunk in the backward pass, where everything is used several times

Index = tuple[Tensor, Tensor, Tensor]  # queries, keys and weights


def select_document(
    index_query: Tensor,
    index_key: Tensor,
    index_weights: Tensor,
    k: int,
    forced_NS: Tensor | None,
    into: tuple[Tensor, Tensor],
) -> None:
    """Each query's keys in one document, as `reference.select_topk` chooses them, and their scores.

    Args:
        index_query: [N, J, E].
        index_key: [N, E].
        index_weights: [N, J].
        k: how many keys a query may take; at most N.
        forced_NS: int32 [N, S], a selection to take instead: positions in the document, -1 at the tail.
        into: takes the positions in the document, int32 [N, S], ascending, and their scores [N, S], in the precision of
            the maths. Filled with -1 and -inf beforehand, which the tails keep.
    """
    chosen_NS, score_NS = into
    key_KE, weights = wide(index_key), wide(index_weights)
    for rows in _score_chunks(len(key_KE), *weights.shape[1:], k, weights.element_size()):
        score_CK = _causal_scores(wide(index_query[rows]), key_KE, weights[rows], rows.stop)
        if forced_NS is not None:
            chosen_CS = forced_NS[rows]
        elif rows.stop <= k:
            chosen_CS = _all_causal(score_CK, rows)
        else:
            chosen_CS = _largest(score_CK, k)
        width = chosen_CS.shape[1]
        chosen_NS[rows, :width] = chosen_CS
        score_CS = score_CK.gather(1, chosen_CS.clamp(min=0).long())
        score_NS[rows, :width] = score_CS.masked_fill_(chosen_CS < 0, float("-inf"))


def _chunk_rows(heads: int) -> int:
    return max(16, CHUNK_PRODUCTS // heads)


def _regular(rows: int, heads: int, keys: slice) -> bool:
    return rows == _chunk_rows(heads) and (keys.stop - keys.start) % KEYS_STEP == 0


def _score_chunks(n: int, heads: int, k: int, element_bytes: int) -> Iterator[slice]:
    """The document's queries: `_chunk_rows` at once where memory allows, and none across row k."""
    wanted = _chunk_rows(heads)
    step = max(1, min(wanted, SCORE_BYTES // (n * element_bytes), TILE_BYTES // (heads * element_bytes)))
    for low, high in ((0, min(k, n)), (min(k, n), n)):
        for first in range(low, high, step):
            yield slice(first, min(first + step, high))


def _causal_scores(query_CJE: Tensor, key_NE: Tensor, weights_CJ: Tensor, stop: int) -> Tensor:
    """I [C, K] of the C queries before `stop`, -inf in the future, and for a few keys from `stop` on: equation (1)."""
    rows, heads = weights_CJ.shape
    keys = rounded(stop, KEYS_STEP, len(key_NE))
    flat = query_CJE.flatten(0, 1)
    score_CK = flat.new_empty(rows, keys)
    for tile in _key_tiles(len(flat), keys, flat.element_size()):
        match = product(flat, key_NE[tile], _regular(rows, heads, tile)).relu_()
        score_CK[:, tile] = torch.bmm(weights_CJ[:, None], match.view(rows, heads, -1))[:, 0]
    # NaN would stay NaN if -inf were added, and a future one has to go.
    last_CK = score_CK[:, stop - rows :]
    last_CK.masked_fill_(torch.ones(last_CK.shape, dtype=torch.bool, device=score_CK.device).triu_(1), float("-inf"))
    return score_CK


def _key_tiles(rows: int, keys: int, element_bytes: int) -> Iterator[slice]:
    """The keys in tiles whose products with `rows` rows stay in a cache."""
    step = max(1, min(TILE_KEYS, TILE_BYTES // (rows * element_bytes)))
    if step > KEYS_STEP:  # regular ones, whatever the number of index heads
        step -= step % KEYS_STEP
    for first in range(0, keys, step):
        yield slice(first, min(first + step, keys))


def _all_causal(score_CK: Tensor, rows: slice) -> Tensor:
    """Queries with at most k keys take all, int32 [C, K]; but for -inf, which counts as not allowed."""
    place_K = torch.arange(rows.stop, dtype=torch.int32, device=score_CK.device)
    causal_CK = place_K <= place_K[rows.start :, None]
    if bool(((score_CK[:, : rows.stop] == float("-inf")) & causal_CK).any()):
        return select_topk(score_CK, rows.stop).int()
    return torch.where(causal_CK, place_K, -1)


def _largest(score_CK: Tensor, k: int) -> Tensor:
    """`select_topk(score_CK, k)` as int32 [C, k], for rows of more than k keys.

    A partial sort of k + 1 keys tells whether the k-th and the next one tie. Where they do not, the set is unique and the
    order of a partial sort, which is arbitrary among equals, does not matter. The other rows are chosen by counting.
    """
    keys = score_CK.shape[1]
    value, place = score_CK.topk(k + 1, sorted=False)
    spare_C1 = value.argmin(1, keepdim=True)
    next_C1 = value.gather(1, spare_C1)
    last_C = value.scatter_(1, spare_C1, float("inf")).amin(1)  # the k-th largest
    chosen_CS = place.int().scatter_(1, spare_C1, keys).sort(-1).values[:, :k]
    unclear_C = ~(last_C > next_C1[:, 0])  # equal, or one of them NaN
    if bool(unclear_C.any()):
        broken_C = unclear_C & ~(last_C > float("-inf"))  # NaN, or fewer than k allowed keys
        tied_C = unclear_C & ~(broken_C | score_CK.isnan().any(1))
        broken_C = unclear_C & ~tied_C
        chosen_CS[tied_C] = _newest_of_equals(score_CK[tied_C], last_C[tied_C][:, None], k)
        chosen_CS[broken_C] = select_topk(score_CK[broken_C], k).int()
    return chosen_CS


def _newest_of_equals(score_RK: Tensor, last_R1: Tensor, k: int) -> Tensor:
    """int32 [R, k]: all keys above the k-th largest score, and of those equal to it the newest."""
    above_RK, equal_RK = score_RK > last_R1, score_RK == last_R1
    rank_RK = equal_RK.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)  # 1 for the newest
    taken_RK = above_RK | (equal_RK & (rank_RK <= k - above_RK.sum(-1, keepdim=True)))
    return taken_RK.nonzero()[:, 1].view(-1, k).int()


def index_gradients(
    inputs: Index,
    chosen_NS: Tensor,
    begin: int,
    d_score_NS: Tensor,
    d_kl: Tensor,
    into: Index,
) -> None:
    """Gradients of d_kl * sum(d_score * I[chosen]) in one document.

    With m[t,j,s] = q_I[t,j] . k_I[s]:  dw[t,j] = sum_s dI[t,s] relu(m);  dm[t,j,s] = dI[t,s] w[t,j] [m > 0].

    Args:
        inputs: index_query [N, J, E], index_key [N, E] and index_weights [N, J].
        chosen_NS: int32 [N, S], positions in the pack, -1 at the tail.
        begin: the document's first position.
        d_score_NS: [N, S], zero at the tail.
        d_kl: [], the gradient that arrives.
        into: takes the gradients of the inputs. The first and last are written, in their dtypes; that of the keys, in the
            precision of the maths, is added to.
    """
    heads, dims = inputs[0].shape[1:]
    n, slots = chosen_NS.shape
    inputs = inputs[0], wide(inputs[1]), inputs[2]
    early = min(n, max(slots, int(MASKED_POSITIONS * slots)))
    numbers = BACKWARD_BYTES // into[1].element_size()
    masked_step = _chunk_rows(heads)
    gathered_step = max(1, numbers // (slots * (2 * dims + heads)))
    for low, high, step, gradients in (
        (0, early, masked_step, _masked_gradients),
        (early, n, gathered_step, _gathered_gradients),
    ):
        for first in range(low, high, step):
            rows = slice(first, min(first + step, high))
            # int64: a sum at such indices is three times as fast as at int32. The tail, of gradient zero, points anywhere.
            place_CS = chosen_NS[rows].sub(begin).clamp_(min=0).long()
            gradients(inputs, rows, place_CS, d_score_NS[rows] * d_kl, into)


def _masked_gradients(inputs: Index, rows: slice, place_CS: Tensor, d_score_CS: Tensor, into: Index) -> None:
    """`index_gradients` of the queries `rows`, through all keys up to the last of them."""
    (index_query, index_key, index_weights), (d_query, d_key_KE, d_weights) = inputs, into
    query_CJE, weights_CJ1 = wide(index_query[rows]), wide(index_weights[rows])[..., None]
    flat, weighted = query_CJE.flatten(0, 1), (query_CJE * weights_CJ1).flatten(0, 1)
    d_score_CK = d_score_CS.new_zeros(len(place_CS), rounded(rows.stop, KEYS_STEP, len(index_key)))
    d_score_CK.scatter_add_(1, place_CS, d_score_CS)
    d_flat, d_weights_CJ1 = torch.zeros_like(flat), torch.zeros_like(weights_CJ1)
    for keys in _key_tiles(len(flat), d_score_CK.shape[1], flat.element_size()):
        d_score_C1K = d_score_CK[:, None, keys]
        regular = _regular(*weights_CJ1.shape[:2], keys)
        match_CJK = product(flat, index_key[keys], regular).relu_().view(*weights_CJ1.shape[:2], -1)
        d_weights_CJ1.baddbmm_(match_CJK, d_score_C1K.transpose(1, 2))
        # d I where relu let the product pass. The weights, constant along the keys, go to the smaller factors.
        backward = torch.ops.aten.threshold_backward.grad_input
        d_match = backward(d_score_C1K.expand_as(match_CJK), match_CJK, 0, grad_input=match_CJK).flatten(0, 1)
        d_flat += product(d_match, index_key[keys].T, regular)
        d_key_KE[keys] += product(d_match.T, weighted.T, regular)
    d_query[rows] = d_flat.view_as(query_CJE).mul_(weights_CJ1)
    d_weights[rows] = d_weights_CJ1[..., 0]


def _gathered_gradients(inputs: Index, rows: slice, place_CS: Tensor, d_score_CS: Tensor, into: Index) -> None:
    """`index_gradients` of the queries `rows`, through their chosen keys alone."""
    (index_query, index_key, index_weights), (d_query, d_key_KE, d_weights) = inputs, into
    query_CJE, weights_CJ1 = wide(index_query[rows]), wide(index_weights[rows])[..., None]
    place = place_CS.flatten()
    key_CSE = index_key.index_select(0, place).view(*place_CS.shape, -1)
    match_CJS = torch.bmm(query_CJE, key_CSE.transpose(1, 2)).relu_()
    d_weights[rows] = torch.bmm(match_CJS, d_score_CS[..., None])[..., 0]
    d_match_CJS = match_CJS.sign_().mul_(d_score_CS[:, None])
    d_query[rows] = torch.bmm(d_match_CJS, key_CSE).mul_(weights_CJ1)
    d_key_CSE = torch.bmm(d_match_CJS.transpose(1, 2), query_CJE * weights_CJ1)
    d_key_KE.index_add_(0, place, d_key_CSE.flatten(0, 1))
