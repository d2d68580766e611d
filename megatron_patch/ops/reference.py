"""DeepSeek sparse attention (DSA), the definition. Written to be read: faster backends are tested against this file.

Source: DeepSeek-V3.2 technical report, section 2.1. With queries t and keys s of one document, s <= t:

    (1)  I[t,s] = sum_j  w[t,j] * relu(q_I[t,j] . k_I[s])                     index score
    (2)  S_t    = the k keys with the largest I[t,:];  u[t] = attention of t over S_t alone
    (3)  L      = sum_t KL( p[t,:]   || softmax(I[t,:])   )                   dense warm-up stage
    (4)  L      = sum_t KL( p[t,S_t] || softmax(I[t,S_t]) )                   sparse stage

p[t,:] is the main attention's distribution: softmax probabilities per head, summed over heads, L1-normalised, without
gradient. In the sparse stage each head's softmax already runs over S_t alone, so p[t,S_t] is a distribution on S_t.

What the equations leave open, decided here:

* Order of keys: larger score first; among equal scores the NEWEST key (largest position) first. ReLU makes exact ties
  common. So the set depends neither on padding, nor on a cache, nor on whether gradients are recorded, and an indexer
  whose scores are all equal is a sliding window of the k newest keys.
* A query with fewer than k keys selects all of them; the row is filled up with -1 at its end.
* Precision: everything is computed in fp32 from the inputs as they are (fp64 inputs stay in fp64): both score products,
  both softmaxes, the KL and the product with the values. `out` alone is rounded, once, to the dtype of `value`.
* KL: 0 * log 0 = 0. It is a SUM over counted queries (padding is not counted), to be divided by the caller.
* Gradients: `indexer_kl` reaches index_query, index_key, index_weights only; `out` reaches query, key, value only.

Shape letters: T tokens of the pack, N tokens of one document, Q queries, K keys, H heads, D dims of a query or key
head, V dims of a value head, J index heads, E dims of an index head, S slots of a selected row.
"""

from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_patch.ops.checks import check_inputs, check_selection

Stage = Literal["dense", "sparse"]


class DsaOutput(NamedTuple):
    """What `dsa_attention` returns.

    out: [T, H, V], value's dtype.
    indexer_kl: [], fp32 (fp64 for fp64 inputs), nats. SUM over counted queries. Gradient to index_* only.
    index_recall: [], same dtype, no gradient. SUM over counted queries of the dense attention mass (mean over heads)
        inside the selected set; 1 per query would be a perfect choice. None where it was not asked for.
    indices: [T, S] int32, selected positions in the pack, ascending, -1 at the tail; S = min(topk, longest document).
    """

    out: Tensor
    indexer_kl: Tensor
    index_recall: Tensor | None
    indices: Tensor


def dsa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    index_weights: Tensor,
    cu_seqlens: Tensor,
    *,
    topk: int,
    softmax_scale: float,
    stage: Stage = "sparse",
    counted: Tensor | None = None,
    indices: Tensor | None = None,
    recall: bool = True,
) -> DsaOutput:
    """Causal attention inside each packed document, with the lightning indexer's selection and loss.

    Args:
        query, key: [T, H, D], positions already encoded. key has as many heads as query.
        value: [T, H, V].
        index_query: [T, J, E], positions already encoded.
        index_key: [T, E], likewise.
        index_weights: [T, J], fp32, already scaled by J**-0.5 * E**-0.5.
        cu_seqlens: int32 [n + 1], where documents begin and end: 0 first, T last, never decreasing. An empty document
            is allowed and contributes nothing.
        topk: k, how many keys a query may attend to.
        softmax_scale: factor on query . key, YaRN's part included.
        stage: "dense": attention over all causal keys and equation (3), the selection is reported but has no effect on
            `out`; "sparse": attention over S_t and equation (4).
        counted: bool [T], queries that count in `indexer_kl` and `index_recall`; None counts all.
        indices: a selection to use in place of the indexer's own, in the form of `DsaOutput.indices` with any number of
            slots, e.g. one recorded by another forward pass.
        recall: whether `index_recall` is wanted. In the sparse stage it takes the dense attention, which nothing else needs.

    Raises:
        ValueError: shapes, dtypes, `cu_seqlens` or a forced selection that break the above; a forced selection that is
            empty for some query, or holds a future position or another document's.
    """
    ends = check_inputs(query, key, value, index_query, index_key, index_weights, cu_seqlens, topk, stage, counted)
    if indices is not None:
        check_selection(indices, cu_seqlens)
    longest = max(end - begin for begin, end in pairwise(ends))
    slots = min(topk, longest) if indices is None else indices.shape[1]

    parts = []
    for begin, end in pairwise(ends):
        if begin == end:
            continue
        doc = slice(begin, end)
        forced_NS = None if indices is None else torch.where(indices[doc] >= 0, indices[doc] - begin, -1).long()
        parts.append(
            _one_document(
                *(x[doc] for x in (query, key, value, index_query, index_key, index_weights)),
                slots=slots,
                begin=begin,
                softmax_scale=softmax_scale,
                stage=stage,
                counted_N=None if counted is None else counted[doc],
                forced_NS=forced_NS,
            )
        )
    out, kl, recall_parts, chosen = zip(*parts, strict=True)
    mass = torch.stack(recall_parts).sum() if recall else None
    return DsaOutput(torch.cat(out), torch.stack(kl).sum(), mass, torch.cat(chosen))


def index_scores(index_query: Tensor, index_key: Tensor, index_weights: Tensor) -> Tensor:
    """Equation (1), without any mask.

    Args:
        index_query: [Q, J, E].
        index_key: [K, E].
        index_weights: [Q, J], scaled.

    Returns:
        [Q, K], fp32 (fp64 for fp64 inputs).
    """
    q_QJE, k_KE, w_QJ = wide(index_query), wide(index_key), wide(index_weights)
    match_QJK = torch.einsum("qje,ke->qjk", q_QJE, k_KE).relu()
    return torch.einsum("qj,qjk->qk", w_QJ, match_QJK)


def select_topk(scores: Tensor, k: int) -> Tensor:
    """The k keys with the largest scores of each query; the newest (largest index) wins ties.

    Args:
        scores: [Q, K], float, with -inf where a key is not allowed. NaN counts as largest, so that a broken indexer
            shows in the loss instead of vanishing from the selection.
        k: at least 1.

    Returns:
        int64 [Q, min(k, K)]: positions in ascending order, then -1 where a query has fewer than k allowed keys.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1: got {k}")
    num_keys = scores.shape[-1]
    # + 0.0 turns -0.0 into +0.0 (a negative weight times relu's zero): some devices' sorts tell the two apart.
    newest_first_QK = scores.detach().flip(-1) + 0.0
    sorted_QK, order_QK = newest_first_QK.sort(dim=-1, descending=True, stable=True)
    best_QS, order_QS = sorted_QK[..., :k], order_QK[..., :k]
    position_QS = (num_keys - 1 - order_QS).masked_fill(best_QS == float("-inf"), num_keys)
    position_QS = position_QS.sort(dim=-1).values
    return position_QS.masked_fill(position_QS == num_keys, -1)


def _one_document(
    query: Tensor,  # [N, H, D]
    key: Tensor,  # [N, H, D]
    value: Tensor,  # [N, H, V]
    index_query: Tensor,  # [N, J, E]
    index_key: Tensor,  # [N, E]
    index_weights: Tensor,  # [N, J]
    *,
    slots: int,
    begin: int,  # the document's first position in the pack
    softmax_scale: float,
    stage: Stage,
    counted_N: Tensor | None,
    forced_NS: Tensor | None,  # positions in the document, -1 at the tail
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out [N, H, V], KL [], recall [], indices int32 [N, slots]) of one document."""
    n = query.shape[0]
    causal_NN = torch.ones(n, n, dtype=torch.bool, device=query.device).tril()

    score_NN = index_scores(index_query, index_key, index_weights)  # eq. (1)
    if forced_NS is None:
        # Without its gradient: a second pass of --recompute-dsa, which is given the keys, keeps what the first one kept.
        chosen_NS = select_topk(score_NN.detach().masked_fill(~causal_NN, float("-inf")), slots)
        chosen_NS = torch.nn.functional.pad(chosen_NS, (0, slots - chosen_NS.shape[1]), value=-1)
    else:
        chosen_NS = forced_NS
    selected_NN = selection_mask(chosen_NS, n)  # S_t, eq. (2)
    attended_NN = selected_NN if stage == "sparse" else causal_NN

    logit_HNN = torch.einsum("qhd,khd->hqk", wide(query), wide(key)) * softmax_scale
    prob_HNN = logit_HNN.masked_fill(~attended_NN, float("-inf")).softmax(-1)
    out_NHV = torch.einsum("hqk,khv->qhv", prob_HNN, wide(value)).to(value.dtype)

    target_NN = prob_HNN.detach().sum(0)
    target_NN = target_NN / target_NN.sum(-1, keepdim=True)
    log_index_NN = score_NN.masked_fill(~attended_NN, float("-inf")).log_softmax(-1)
    # Outside the set both are 0 and -inf: 0 * log 0 = 0 has to be said, in the product and in its gradient.
    log_index_NN = log_index_NN.masked_fill(~attended_NN, 0.0)
    kl_N = (torch.special.xlogy(target_NN, target_NN) - target_NN * log_index_NN).sum(-1)  # eq. (3) or (4)

    with torch.no_grad():
        dense_NN = logit_HNN.masked_fill(~causal_NN, float("-inf")).softmax(-1).mean(0)
        recall_N = dense_NN.masked_fill(~selected_NN, 0.0).sum(-1)

    if counted_N is not None:
        kl_N, recall_N = kl_N[counted_N], recall_N[counted_N]
    pack_NS = torch.where(chosen_NS >= 0, chosen_NS + begin, -1).to(torch.int32)
    return out_NHV, kl_N.sum(), recall_N.sum(), pack_NS


def selection_mask(chosen_QS: Tensor, num_keys: int) -> Tensor:
    """Selected positions int64 [Q, S] with -1 padding -> bool [Q, num_keys]."""
    spare = torch.where(chosen_QS >= 0, chosen_QS, num_keys)  # padding goes to one column more, which is cut off
    mask = torch.zeros(chosen_QS.shape[0], num_keys + 1, dtype=torch.bool, device=chosen_QS.device)
    return mask.scatter_(1, spare, True)[:, :num_keys]


def wide(x: Tensor) -> Tensor:
    """In the precision of the maths: fp32, or fp64 where `x` is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
