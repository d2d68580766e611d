"""DeepSeek sparse attention in chunks of queries: `reference.dsa_attention` without anything of size tokens x tokens.

A chunk is a run of queries of one document with all keys of that document up to its last query. A chunk's index scores,
selection, attention and KL are dropped before the next one begins, so the workspace is O(chunk x keys). For the backward
pass remain query, key and value as they came, the selected positions, and three finished gradients:

* Attention probabilities are computed again from the logits: `masked.attention_gradients`.

* The KL's gradient has a closed form, p being constant. With m[t,j,s] = q_I[t,j] . k_I[s]:

      d KL / d I = softmax(I) - p;   dw[t,j] = sum_s dI[t,s] relu(m);   dm[t,j,s] = dI[t,s] w[t,j] [m > 0]

  and from dm those of q_I and k_I. All it takes is at hand in the forward pass, which computes it there, for a KL of
  weight 1; the backward pass scales it. The index scores, the dearest product, are thus computed once.

Shape letters: those of reference.py, and C queries of a chunk, K keys that they may see.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_patch.ops import masked
from megatron_patch.ops.call import Call, accept
from megatron_patch.ops.reference import DsaOutput, Stage, select_topk, selection_mask, wide

# Of one chunk's workspace. On a CPU, products of a few dozen rows are as fast as larger ones.
CHUNK_BYTES = 64 * 2**20
PAIR_BYTES = 40  # of a query and a key, without heads: scores, masks, and the sort's copies and int64 positions


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

    Arguments and result are those of `reference.dsa_attention`, equal up to the order of sums. Gradients are computed
    in fp32 (fp64) and rounded once, to their inputs' dtypes.

    Raises:
        ValueError: as there.
        RuntimeError: in a backward pass that is to be differentiated itself (`create_graph=True`).
    """
    attention, index = (query, key, value), (index_query, index_key, index_weights)
    call = accept(attention, index, cu_seqlens, topk, softmax_scale, stage, counted, indices, recall)
    return DsaOutput(*_ChunkedDsa.apply(*attention, *index, call))


def chunk_rows(num_keys: int, heads: int, index_heads: int, element_bytes: int = 4) -> int:
    """How many queries of a document of `num_keys` tokens are worked on at once: one at least, all at most.

    At the peak, a query and a key take a number an index head and two an attention head: logit and probability, or
    probability and gradient.

    Args:
        index_heads: 0 for the backward pass, which has no index scores.
        element_bytes: 4 for fp32, 8 for fp64.
    """
    per_row = num_keys * (element_bytes * (index_heads + 2 * heads) + PAIR_BYTES)
    return max(1, min(num_keys, CHUNK_BYTES // per_row))


class _Chunk(NamedTuple):
    """Queries of one document and the keys up to the last of them: where they stand in the pack."""

    rows: slice
    keys: slice

    def causal_mask(self, device: torch.device) -> Tensor:
        """bool [C, K], False where a key lies in the query's future."""
        shape = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        return torch.ones(shape, dtype=torch.bool, device=device).tril(self.rows.start - self.keys.start)

    def from_pack(self, selection_TS: Tensor) -> Tensor:
        """The chunk's rows of a selection, in positions of the document: int64 [C, S]."""
        selection_CS = selection_TS[self.rows].long()
        return torch.where(selection_CS >= 0, selection_CS - self.keys.start, -1)

    def to_pack(self, selection_CS: Tensor) -> Tensor:
        """The reverse: int32 [C, S]."""
        return torch.where(selection_CS >= 0, selection_CS + self.keys.start, -1).int()


def _chunks(ends: list[int], heads: int, index_heads: int, element_bytes: int) -> Iterator[_Chunk]:
    """All queries in order. How a document is cut depends on nothing else in the pack, nor then does its result."""
    for begin, end in pairwise(ends):
        step = chunk_rows(end - begin, heads, index_heads, element_bytes) if begin < end else 1
        for first in range(begin, end, step):
            last = min(first + step, end)
            yield _Chunk(slice(first, last), slice(begin, last))


class _ChunkedDsa(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, index_query, index_key, index_weights, call: Call):
        """(out [T, H, V], KL [], recall [] or None, indices int32 [T, S])."""
        tokens, heads, _ = query.shape
        out = value.new_empty(value.shape)
        kl_T, recall_T = (x.new_empty(tokens, dtype=_wide_dtype(x)) for x in (index_weights, query))
        indices = torch.full((tokens, call.slots), -1, dtype=torch.int32, device=query.device)
        index_inputs = index_query, index_key, index_weights
        d_index = [torch.zeros_like(x, dtype=_wide_dtype(x)) for x in index_inputs] if call.indexer_learns else []

        for chunk in _chunks(call.ends, heads, index_query.shape[1], kl_T.element_size()):
            rows, keys = chunk
            index = wide(index_query[rows]), wide(index_key[keys]), wide(index_weights[rows])
            match_CJK, score_CK = _index_scores(*index)
            causal_CK = chunk.causal_mask(query.device)
            if call.forced_TS is None:
                chosen_CS = select_topk(score_CK.masked_fill(~causal_CK, float("-inf")), call.slots)
            else:
                chosen_CS = chunk.from_pack(call.forced_TS)
            indices[rows, : chosen_CS.shape[1]] = chunk.to_pack(chosen_CS)
            selected_CK = selection_mask(chosen_CS, causal_CK.shape[1])

            logit_HCK = masked.logits(query[rows], key[keys], call.softmax_scale, causal_CK)
            if call.recall:
                recall_T[rows] = masked.dense_mass(logit_HCK, selected_CK)
            attended_CK = selected_CK if call.sparse else causal_CK
            if call.sparse:
                logit_HCK.add_(masked.additive(selected_CK, logit_HCK.dtype))
            out[rows], target_CK = masked.output_and_target(logit_HCK, value[keys])
            del logit_HCK
            kl_T[rows], d_score_CK = _kl(target_CK, score_CK, attended_CK)
            if call.indexer_learns:
                if call.counted_T is not None:
                    d_score_CK.masked_fill_(~call.counted_T[rows, None], 0.0)
                d_query_CJE, d_key_KE, d_weights_CJ = _index_gradients(d_score_CK, match_CJK, *index)
                d_index[0][rows], d_index[2][rows] = d_query_CJE, d_weights_CJ
                d_index[1][keys] += d_key_KE
            del match_CJK  # before the next chunk's is made

        if call.counted_T is not None:
            kl_T, recall_T = kl_T[call.counted_T], recall_T[call.counted_T]
        kl, recall = kl_T.sum(), recall_T.sum() if call.recall else None
        ctx.call, ctx.index_dtypes = call, [x.dtype for x in index_inputs]
        ctx.set_materialize_grads(False)  # a result that no loss uses costs no backward work
        constant = [x for x, learns in ((out, call.attention_learns), (kl, call.indexer_learns)) if not learns]
        ctx.mark_non_differentiable(indices, *constant, *([recall] if call.recall else []))
        # Indices are what a sparse stage needs to find its mask again.
        attention = (query, key, value, indices if call.sparse else None) if call.attention_learns else (None,) * 4
        ctx.save_for_backward(*attention, *d_index)
        return out, kl, recall, indices

    @staticmethod
    def backward(ctx, d_out, d_kl, *_):
        if torch.is_grad_enabled():  # once_differentiable would let a constant d_out pass, and drop the second gradient
            raise RuntimeError("the chunked DSA op has no second derivative: call backward without create_graph=True")
        query, key, value, indices, *d_index = ctx.saved_tensors  # once: under checkpoint a second reading is an error
        d_attention = (None, None, None)
        if d_out is not None and ctx.call.attention_learns:
            d_attention = _attention_gradients(d_out, query, key, value, indices, ctx.call)
        if d_kl is None or not d_index:
            return *d_attention, None, None, None, None
        return *d_attention, *((x * d_kl).to(dtype) for x, dtype in zip(d_index, ctx.index_dtypes, strict=True)), None


def _index_scores(query_CJE: Tensor, key_KE: Tensor, weights_CJ: Tensor) -> tuple[Tensor, Tensor]:
    """(relu(q_I . k_I) [C, J, K], I [C, K]): equation (1)."""
    match_CJK = (query_CJE.flatten(0, 1) @ key_KE.T).relu_().unflatten(0, weights_CJ.shape)
    return match_CJK, torch.bmm(weights_CJ[:, None], match_CJK)[:, 0]


def _index_gradients(
    d_score_CK: Tensor, match_CJK: Tensor, query_CJE: Tensor, key_KE: Tensor, weights_CJ: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (d query [C, J, E], d key [K, E], d weights [C, J]) of sum(d_score * I). Overwrites `match_CJK`."""
    d_weights_CJ = torch.bmm(d_score_CK[:, None], match_CJK.transpose(1, 2))[:, 0]
    # The sign of relu's result is its derivative. The weights, constant along the keys, go to the smaller factors.
    d_match_CJK = match_CJK.sign_().mul_(d_score_CK[:, None])
    d_query_CJE = (d_match_CJK.flatten(0, 1) @ key_KE).view_as(query_CJE).mul_(weights_CJ[..., None])
    d_key_KE = d_match_CJK.flatten(0, 1).T @ (query_CJE * weights_CJ[..., None]).flatten(0, 1)
    return d_query_CJE, d_key_KE, d_weights_CJ


def _kl(target_CK: Tensor, score_CK: Tensor, attended_CK: Tensor) -> tuple[Tensor, Tensor]:
    """(KL [C], its gradient softmax(I) - p [C, K]): equations (3) and (4)."""
    log_index_CK = score_CK.masked_fill(~attended_CK, float("-inf")).log_softmax(-1)
    cross_CK = target_CK * log_index_CK.masked_fill(~attended_CK, 0.0)  # 0 * log 0 = 0
    return (torch.special.xlogy(target_CK, target_CK) - cross_CK).sum(-1), log_index_CK.exp_().sub_(target_CK)


def _attention_gradients(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, indices: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their dtypes. `indices` is None where all causal keys are attended to."""
    heads, dtype = query.shape[1], _wide_dtype(query)
    d_query = query.new_empty(query.shape)
    d_key, d_value = (x.new_zeros(x.shape, dtype=_wide_dtype(x)) for x in (key, value))
    for chunk in _chunks(call.ends, heads, 0, dtype.itemsize):
        rows, keys = chunk
        allowed_CK = chunk.causal_mask(query.device)
        if indices is not None:
            allowed_CK = selection_mask(chunk.from_pack(indices), allowed_CK.shape[1])
        into = d_query[rows], d_key[keys], d_value[keys]
        masked.attention_gradients(d_out[rows], query[rows], key[keys], value[keys], allowed_CK, call.softmax_scale, into)
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
