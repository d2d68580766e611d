"""DeepSeek sparse attention whose sparse stage works on the selected keys alone: `reference.dsa_attention` for long documents.

A document is worked through three times: its selection (`index_selection.py`), its attention with the KL, and, in the
backward pass, both in turn. Between forward and backward remain query, key, value and the indexer's inputs as they came, the
selected positions (int32) and d KL / d I at these positions: both [tokens, top-k].

A block of queries attends in one of two ways, which give the same up to the order of sums. Early in a document the selected keys
are a large part of all, and masked products over all of them are faster (`dense_rows.py`); later products at the selected pairs
are (`sparse_rows.py`).

`index_recall` compares with dense attention, which costs as much as all logits of a dense forward pass: pass `recall=False`
where nobody looks at it. In the dense stage there is nothing to leave out; `chunked.dsa_attention` computes it.

Shape letters: those of reference.py, and R queries of a block, C of a chunk, K keys up to the last of them.
"""

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from megatron_patch.ops import chunked, dense_rows, masked, sparse_rows
from megatron_patch.ops.call import Call, accept
from megatron_patch.ops.index_selection import index_gradients, select_document
from megatron_patch.ops.reference import DsaOutput, Stage, selection_mask, wide

# A query whose position is below this times top-k attends by masked products. Measured on a CPU at 16 heads of 192/128: a pair of
# such a product takes 17 to 20 ns a head, forward and backward, a selected pair 42 to 54.
MASKED_POSITIONS = 2.6
RECALL_BYTES = 8 * 2**20  # of a chunk's logits


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
    options = {"topk": topk, "softmax_scale": softmax_scale, "stage": stage, "counted": counted, "indices": indices}
    if stage == "dense":
        return chunked.dsa_attention(*attention, *index, cu_seqlens, **options, recall=recall)
    call = accept(attention, index, cu_seqlens, recall=recall, **options)
    return DsaOutput(*_SparseDsa.apply(*attention, *index, call))


def masked_rows(n: int, k: int) -> int:
    """How many queries at a document's start attend by masked products: all that have fewer than k keys among them.

    Args:
        n: tokens of the document.
        k: how many keys a query may take.
    """
    return min(n, max(k, int(MASKED_POSITIONS * k)))


def _blocks(n: int, k: int, element_bytes: int) -> Iterator[tuple[slice, slice, ModuleType]]:
    """(queries, keys that they may see, how they attend): how a document is cut depends on its length alone."""
    early = masked_rows(n, k)
    step = dense_rows.block_rows(early, element_bytes)
    for first in range(0, early, step):
        last = min(first + step, early)
        yield slice(first, last), slice(0, last), dense_rows
    step = sparse_rows.block_rows(n, k)
    for first in range(early, n, step):
        yield slice(first, min(first + step, n)), slice(0, n), sparse_rows


class _SparseDsa(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, index_query, index_key, index_weights, call: Call):
        """(out [T, H, V], KL [], recall [] or None, indices int32 [T, S])."""
        tokens = query.shape[0]
        index_inputs = index_query, index_key, index_weights
        out = value.new_empty(value.shape)
        kl_T, recall_T = (wide(x[:0]).new_zeros(tokens) for x in (index_weights, query))
        indices = torch.full((tokens, call.slots), -1, dtype=torch.int32, device=query.device)
        score_TS = kl_T.new_full((tokens, call.slots), float("-inf"))  # becomes d KL / d I
        for doc in call.documents:
            k = min(call.slots, doc.stop - doc.start)
            chosen_NS, score_NS = indices[doc, :k], score_TS[doc, :k]
            forced_NS = None if call.forced_TS is None else _moved(call.forced_TS[doc, :k], -doc.start)
            select_document(*(x[doc] for x in index_inputs), k, forced_NS, (chosen_NS, score_NS))
            _attend(query[doc], key[doc], value[doc], chosen_NS, score_NS, call, (out[doc], kl_T[doc]))
            if call.recall:
                _recall(query[doc], key[doc], chosen_NS, call.softmax_scale, recall_T[doc])
            chosen_NS.copy_(_moved(chosen_NS, doc.start))

        if call.counted_T is not None:
            kl_T, recall_T = kl_T[call.counted_T], recall_T[call.counted_T]
            score_TS.masked_fill_(~call.counted_T[:, None], 0.0)
        kl, recall = kl_T.sum(), recall_T.sum() if call.recall else None
        ctx.call = call
        ctx.set_materialize_grads(False)  # a result that no loss uses costs no backward work
        constant = [x for x, learns in ((out, call.attention_learns), (kl, call.indexer_learns)) if not learns]
        ctx.mark_non_differentiable(indices, *constant, *([recall] if call.recall else []))
        attention = (query, key, value) if call.attention_learns else (None,) * 3
        index = (*index_inputs, score_TS) if call.indexer_learns else (None,) * 4
        ctx.save_for_backward(*attention, *index[:3], indices, index[3])
        return out, kl, recall, indices

    @staticmethod
    def backward(ctx, d_out, d_kl, *_):
        if torch.is_grad_enabled():  # once_differentiable would let a constant d_out pass, and drop the second gradient
            raise RuntimeError("the sparse DSA op has no second derivative: call backward without create_graph=True")
        *inputs, indices, d_score_TS = ctx.saved_tensors  # once: under checkpoint a second reading is an error
        call: Call = ctx.call
        d_attention = d_index = (None, None, None)
        if d_out is not None and call.attention_learns:
            d_attention = _attention_gradients(d_out, *inputs[:3], indices, call)
        if d_kl is not None and call.indexer_learns:
            d_index = _index_gradients(*inputs[3:], indices, d_score_TS, d_kl, call)
        return *d_attention, *d_index, None


def _moved(chosen_NS: Tensor, by: int) -> Tensor:
    """Positions moved by so many, the -1 at the tail left: int32."""
    return torch.where(chosen_NS >= 0, chosen_NS + by, -1).int()


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chosen_NS: Tensor,
    score_NS: Tensor,
    call: Call,
    into: tuple[Tensor, Tensor],
) -> None:
    """Write one document's output [N, H, V] and KL [N] to `into`, and d KL / d I over the scores."""
    out, kl_N = into
    for rows, keys, how in _blocks(*chosen_NS.shape, score_NS.element_size()):
        target_RS = how.attend(query[rows], key[keys], value[keys], chosen_NS[rows], call.softmax_scale, out[rows])
        kl_N[rows] = _kl(target_RS, score_NS[rows], chosen_NS[rows] < 0)


def _kl(target_CS: Tensor, score_CS: Tensor, unused_CS: Tensor) -> Tensor:
    """KL [C], equation (4). Its gradient softmax(I) - p takes the place of the scores."""
    log_index_CS = score_CS.log_softmax(-1)
    cross_CS = target_CS * log_index_CS.masked_fill(unused_CS, 0.0)  # 0 * log 0 = 0
    kl_C = (torch.special.xlogy(target_CS, target_CS) - cross_CS).sum(-1)
    score_CS.copy_(log_index_CS.exp_().sub_(target_CS))
    return kl_C


def _recall(query: Tensor, key: Tensor, chosen_NS: Tensor, softmax_scale: float, recall_N: Tensor) -> None:
    """Write the dense attention's mass in one document's selection, [N]."""
    n, heads, _ = query.shape
    step = max(1, min(n, RECALL_BYTES // (2 * heads * n * recall_N.element_size())))
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        causal_CK = torch.ones(rows.stop - rows.start, rows.stop, dtype=torch.bool, device=query.device).tril(rows.start)
        logit_HCK = masked.logits(query[rows], key[: rows.stop], softmax_scale, causal_CK)
        recall_N[rows] = masked.dense_mass(logit_HCK, selection_mask(chosen_NS[rows].long(), rows.stop))


def _attention_gradients(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, indices: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their dtypes."""
    d_query = query.new_empty(query.shape)
    d_key, d_value = (wide(x[:0]).new_zeros(x.shape) for x in (key, value))
    for doc in call.documents:
        n, k = doc.stop - doc.start, min(call.slots, doc.stop - doc.start)
        for rows, keys, how in _blocks(n, k, d_key.element_size()):
            here, seen = (slice(doc.start + x.start, doc.start + x.stop) for x in (rows, keys))
            chosen_RS = _moved(indices[here, :k], -doc.start)
            into = d_query[here], d_key[seen], d_value[seen]
            how.attention_gradients(
                d_out[here], query[here], key[seen], value[seen], chosen_RS, call.softmax_scale, into
            )
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype)


def _index_gradients(
    query: Tensor, key: Tensor, weights: Tensor, indices: Tensor, d_score_TS: Tensor, d_kl: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the indexer's three inputs, in their dtypes."""
    d_query, d_weights = (x.new_empty(x.shape) for x in (query, weights))
    d_key = wide(key[:0]).new_zeros(key.shape)
    for doc in call.documents:
        k = min(call.slots, doc.stop - doc.start)
        inputs, into = (query[doc], key[doc], weights[doc]), (d_query[doc], d_key[doc], d_weights[doc])
        index_gradients(inputs, indices[doc, :k], doc.start, d_score_TS[doc, :k], d_kl, into)
    return d_query, d_key.to(key.dtype), d_weights
