"""DSA on Ascend: `reference.dsa_attention` of absorbed MLA through the fused operators of torch_npu.

    selection   npu_lightning_indexer        index scores and top-k; documents apart, causal
    attention   npu_sparse_flash_attention   over the selected keys; torch_npu brings its gradient
    KL          npu_sparse_lightning_indexer_grad_kl_loss where it takes the model's heads, else `chunked`: npu_limits.fused_kl

Absorbed: MLA's key up-projection is multiplied into the query and its value up-projection into the output, so that all
heads share one key (latent and RoPE part) whose latent part is the value as well. This is the only form that the sparse
operator computes. Index queries, weights and the dense warm-up stage stay what they are; the latter is `chunked`'s.

Written from the operators' documents (torch_npu's API reference; CANN 9). **Not run on a device.** The tests hold it
against the reference through an emulator of those documents.

What differs from the definition, because the operator decides it: among equal index scores the order is the operator's
own, and scores are computed in its precision. The selection is used in ascending order, so that sums over the selected
keys do not depend on the order in which a parallel top-k found them. `index_recall` needs dense attention, which the
fused KL never computes: it is NaN there (null in metrics.jsonl).

Shape letters: T tokens of the pack, H heads, R dims of the latent, P RoPE dims, J index heads, E dims of an index head,
S slots of a selected row, K slots as the operators have them (topk).
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_patch.ops import chunked
from megatron_patch.ops.npu_limits import ATTENTION, fused_kl, operators
from megatron_patch.ops.reference import DsaOutput

CAUSAL, ABSORBED = 3, 2  # sparse_mode, attention_mode


def absorbed_attention(
    query: Tensor,
    query_rope: Tensor,
    latent: Tensor,
    key_rope: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    index_weights: Tensor,
    cu_seqlens: Tensor,
    *,
    topk: int,
    softmax_scale: float,
    counted: Tensor | None = None,
    indices: Tensor | None = None,
) -> DsaOutput:
    """The sparse stage: `reference.dsa_attention` with query [query, query_rope], key [latent, key_rope], value latent.

    Args:
        query: [T, H, R], the key up-projection multiplied in.
        query_rope: [T, H, P], positions encoded.
        latent: [T, R], after its norm.
        key_rope: [T, P], positions encoded.
        index_query, index_key, index_weights, cu_seqlens, topk, softmax_scale, counted, indices: as in the reference.

    Returns:
        As the reference; `out` is [T, H, R], to be multiplied by the value up-projection. Gradients likewise.

    Raises:
        ValueError: shapes; or the fused KL is asked to leave out queries that are not the pack's last.
        RuntimeError: the attention's result has lost its gradient.
    """
    _check_shapes(query, query_rope, latent, key_rope, index_query, index_key, index_weights)
    tokens, heads, _ = query.shape
    ends = cu_seqlens.tolist()
    lengths = [end - begin for begin, end in pairwise(ends) if end > begin]
    longest = max(lengths)
    fused, _ = fused_kl(heads, index_query.shape[1], topk, longest, len(lengths))
    real = _counted_prefix(counted, tokens) if fused else tokens
    # The fused KL takes the counted tokens alone: they are cut off in the packed layout.
    pack = _Pack.of(lengths, query.device, always_packed=real < tokens)
    npu = operators()

    if indices is None:
        chosen, _ = npu.npu_lightning_indexer(
            pack.shaped(index_query.detach()),
            pack.shaped(index_key.detach()[:, None]),
            pack.shaped(index_weights.detach()),
            actual_seq_lengths_query=pack.lengths(),
            actual_seq_lengths_key=pack.lengths(),
            layout_query=pack.layout,
            layout_key=pack.layout,
            sparse_count=topk,
            sparse_mode=CAUSAL,
        )
        chosen_TK = ascending(pack.flat(chosen)[:, 0])
    else:
        chosen_TK = pack.to_documents(indices, topk)

    shared = pack.shaped(latent[:, None])  # one tensor, as key and as value: the operator's absorbed mode relies on it
    out, highest, total = npu.npu_sparse_flash_attention(
        pack.shaped(query),
        shared,
        shared,
        pack.shaped(chosen_TK[:, None]),
        softmax_scale,
        actual_seq_lengths_query=pack.lengths(),
        actual_seq_lengths_kv=pack.lengths(),
        query_rope=pack.shaped(query_rope),
        key_rope=pack.shaped(key_rope[:, None]),
        sparse_block_size=1,
        layout_query=pack.layout,
        layout_kv=pack.layout,
        sparse_mode=CAUSAL,
        attention_mode=ABSORBED,
        return_softmax_lse=True,
    )
    if torch.is_grad_enabled() and query.requires_grad and not out.requires_grad:
        raise RuntimeError(f"{ATTENTION} of this torch_npu has no gradient: the model would not learn; use another release")
    out = pack.flat(out)

    index = index_query, index_key, index_weights
    slots = min(topk, longest) if indices is None else indices.shape[1]
    selection_TS = pack.to_pack(chosen_TK, slots)
    if fused:
        attention = query.detach(), query_rope.detach(), latent.detach(), key_rope.detach()
        kl = _fused_kl_loss(npu, attention, index, pack, chosen_TK, highest, total, softmax_scale, real)
        return DsaOutput(out, kl, kl.new_full((), float("nan")).detach(), selection_TS)
    learned = chunked.dsa_attention(
        torch.cat([query, query_rope], -1).detach(),
        torch.cat([latent, key_rope], -1).detach()[:, None].expand(-1, heads, -1),
        query.new_zeros(1, 1, 1).expand(tokens, heads, 1),  # its output is not used; its probabilities are
        *index,
        cu_seqlens,
        topk=topk,
        softmax_scale=softmax_scale,
        counted=counted,
        indices=selection_TS,
    )
    return learned._replace(out=out)


def ascending(chosen: Tensor) -> Tensor:
    """Rows [T, K] of positions with a -1 tail, sorted, int32. In fp32, exact below 2**24: int32 sorts slowly on Atlas A2."""
    keys_TK = torch.where(chosen >= 0, chosen, 2**24).float().sort(dim=-1).values
    return torch.where(keys_TK < 2**24, keys_TK, -1.0).int()


@dataclass(frozen=True)
class _Pack:
    """A pack of documents in a layout of the operators. Documents of one length are a batch: BSND [B, S, ...]; others
    are packed: TND [T, ...], with the prefix sums of their lengths.

    Attributes:
        ends: where each document ends, empty ones left out.
        begin_T1: where each token's document begins, int32 [T, 1].
    """

    ends: list[int]
    layout: str
    begin_T1: Tensor

    @classmethod
    def of(cls, lengths: list[int], device: torch.device, always_packed: bool) -> "_Pack":
        """`lengths`: tokens of each document that has some."""
        ends = torch.tensor(lengths).cumsum(0)
        begins = (ends - torch.tensor(lengths)).to(device)
        begin_T1 = torch.repeat_interleave(begins, torch.tensor(lengths).to(device)).int()[:, None]
        batch = len(set(lengths)) == 1 and not always_packed
        return cls(ends.tolist(), "BSND" if batch else "TND", begin_T1)

    def shaped(self, x: Tensor) -> Tensor:
        """[T, ...] -> the operator's shape, contiguous."""
        return (x.unflatten(0, (len(self.ends), -1)) if self.layout == "BSND" else x).contiguous()

    def flat(self, x: Tensor) -> Tensor:
        """The reverse."""
        return x.flatten(0, 1) if self.layout == "BSND" else x

    def lengths(self) -> Tensor:
        """int32 [B]: lengths of a batch's rows; prefix sums without the leading 0 in the packed layout."""
        values = [self.ends[0]] * len(self.ends) if self.layout == "BSND" else self.ends
        return torch.tensor(values, dtype=torch.int32, device=self.begin_T1.device)

    def to_pack(self, chosen_TK: Tensor, slots: int) -> Tensor:
        """Positions in documents -> positions in the pack, int32 [T, slots]."""
        return torch.where(chosen_TK >= 0, chosen_TK + self.begin_T1, -1)[:, :slots].int()

    def to_documents(self, selection_TS: Tensor, topk: int) -> Tensor:
        """Positions in the pack -> in documents, int32 [T, K]: filled up to the top-k that the fused KL wants."""
        chosen_TS = torch.where(selection_TS >= 0, selection_TS - self.begin_T1, -1).int()
        return torch.nn.functional.pad(chosen_TS, (0, max(0, topk - chosen_TS.shape[1])), value=-1)


class _Given(torch.autograd.Function):
    """A loss whose gradients were computed with it."""

    @staticmethod
    def forward(ctx, query, key, weights, loss, d_query, d_key, d_weights):
        ctx.save_for_backward(d_query, d_key, d_weights)
        return loss.clone()

    @staticmethod
    def backward(ctx, d_loss):
        return *((d.to(d_loss.dtype) * d_loss).to(d.dtype) for d in ctx.saved_tensors), None, None, None, None


def _fused_kl_loss(npu, attention, index, pack: _Pack, chosen_TK, highest, total, softmax_scale: float, real: int) -> Tensor:
    """KL [] fp32, summed over the first `real` tokens, with the gradients that the operator computes beside it."""
    if real == 0:
        return _Given.apply(*index, index[2].new_zeros(()), *map(torch.zeros_like, index))
    if real < len(chosen_TK):  # packed layout: the softmax statistics are [1, T, H]
        begins = [0, *pack.ends]
        ends = [min(end, real) for begin, end in pairwise(begins) if begin < real]
        pack = _Pack(ends, pack.layout, pack.begin_T1[:real])
        highest, total = highest[:, :real].contiguous(), total[:, :real].contiguous()
    query, query_rope, latent, key_rope = (pack.shaped(x[:real]) for x in attention)
    d_query, d_key, d_weights, loss = npu.npu_sparse_lightning_indexer_grad_kl_loss(
        query,
        latent.unsqueeze(-2),
        pack.shaped(index[0][:real].detach()),
        pack.shaped(index[1][:real].detach()[:, None]),
        pack.shaped(index[2][:real].detach()),
        pack.shaped(chosen_TK[:real, None]),
        highest.detach(),
        total.detach(),
        softmax_scale,
        query_rope=query_rope,
        key_rope=key_rope.unsqueeze(-2),
        actual_seq_qlen=pack.lengths().tolist() if pack.layout == "TND" else None,
        actual_seq_klen=pack.lengths().tolist() if pack.layout == "TND" else None,
        layout=pack.layout,
        sparse_mode=CAUSAL,
    )
    gradients = []
    for x, gradient in zip(index, (d_query, d_key, d_weights), strict=True):
        whole = torch.zeros_like(x)
        whole[:real] = pack.flat(gradient).reshape(real, *x.shape[1:])
        gradients.append(whole)
    return _Given.apply(*index, loss.reshape(()).to(index[2].dtype), *gradients)


def _counted_prefix(counted: Tensor | None, tokens: int) -> int:
    """How many of the first tokens count; padding is the pack's last."""
    if counted is None:
        return tokens
    real = int(counted.sum())
    if not bool(counted[:real].all()):
        raise ValueError("the fused KL counts a pack's first tokens and leaves out its last ones: others are left out here")
    return real


def _check_shapes(query, query_rope, latent, key_rope, index_query, index_key, index_weights) -> None:
    tokens, heads, rank = query.shape
    rope, index_heads, index_dim = query_rope.shape[-1], *index_query.shape[1:]
    wanted = (
        ("query_rope", query_rope, (tokens, heads, rope)),
        ("latent", latent, (tokens, rank)),
        ("key_rope", key_rope, (tokens, rope)),
        ("index_query", index_query, (tokens, index_heads, index_dim)),
        ("index_key", index_key, (tokens, index_dim)),
        ("index_weights", index_weights, (tokens, index_heads)),
    )
    for name, tensor, shape in wanted:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {list(shape)} beside query {list(query.shape)}: got {list(tensor.shape)}")
