"""torch_npu's operators for DSA in plain torch, as their documents describe them, refusing what those refuse.

Sources: torch_npu's API reference for `npu_lightning_indexer`, `npu_sparse_flash_attention` and
`npu_sparse_lightning_indexer_grad_kl_loss` (op-plugin, CANN 9). Nothing here is shared with the package. Where a document
is silent (order of equal scores) the emulator does what the operators' own test programs do: the smaller index first.
"""

import types
from itertools import pairwise

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
LARGE = (3072, 4096, 5120, 6144, 7168, 8192)


class RefusedError(Exception):
    """The operator does not take this."""


def require(holds: bool, text: str) -> None:
    if not holds:
        raise RefusedError(text)


class Contract(types.ModuleType):
    """A stand-in for the module torch_npu.

    Args:
        wide: take any dtype and size, so that results can be compared to more digits than bfloat16 has.

    Attributes:
        calls: (name, layout) of each call, in order.
        ascending: whether every row that the attention was given was ascending.
    """

    __version__ = "contract"

    def __init__(self, wide: bool = False):
        super().__init__("torch_npu")
        self.wide, self.calls, self.ascending = wide, [], True

    @torch.no_grad()  # the operator has no gradient
    def npu_lightning_indexer(
        self, query, key, weights, *, actual_seq_lengths_query=None, actual_seq_lengths_key=None, block_table=None,
        layout_query="BSND", layout_key="BSND", sparse_count=2048, sparse_mode=3, return_value=False,
    ):  # fmt: skip
        self.calls.append(("indexer", layout_query))
        require(layout_query == layout_key and block_table is None, "layouts must agree without page attention")
        require(sparse_mode in (0, 3), "sparse_mode")
        require(not any(x.requires_grad for x in (query, key, weights)), "it has no gradient")
        contiguous(query, key, weights)
        shapes(layout_query, query, key)
        require(weights.shape == query.shape[:-1], "weights are [.., N]")
        if not self.wide:
            require(query.dtype in HALF and key.dtype == query.dtype, "query and key are half precision")
            require(weights.dtype in (torch.float32, query.dtype), "weights are fp32 or as query")
            require(query.shape[-2] <= 64 and query.shape[-1] == 128 == key.shape[-1], "N <= 64, D = 128")
            require(1 <= sparse_count <= 2048 or sparse_count in LARGE, "sparse_count")
        indices = query.new_full((*query.shape[:-2], 1, sparse_count), -1, dtype=torch.int32)
        documents = split(layout_query, actual_seq_lengths_query, query, as_tensor=True)
        same(actual_seq_lengths_query, actual_seq_lengths_key)
        for rows in documents:
            q, k, w = (up(x[rows]) for x in (query, key.squeeze(-2), weights))
            score = torch.einsum("qn,qnk->qk", w, torch.einsum("qnd,kd->qnk", q, k).relu())
            count = min(len(q), sparse_count)
            if sparse_mode == 3:
                score = score.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), float("-inf"))
            best = score.sort(dim=-1, descending=True, stable=True)
            position = best.indices.masked_fill(best.values == float("-inf"), -1)
            indices[rows][:, 0, :count] = position[:, :count].int()
        values = torch.zeros(indices.shape, dtype=query.dtype) if return_value else query.new_zeros(0)
        return indices, values

    def npu_sparse_flash_attention(
        self, query, key, value, sparse_indices, scale_value, *, block_table=None, actual_seq_lengths_query=None,
        actual_seq_lengths_kv=None, query_rope=None, key_rope=None, sparse_block_size=1, layout_query="BSND",
        layout_kv="BSND", sparse_mode=3, attention_mode=0, return_softmax_lse=False,
    ):  # fmt: skip
        self.calls.append(("attention", layout_query))
        require(attention_mode == 2, "only attention_mode 2, absorbed MLA")
        require(layout_query == layout_kv and block_table is None, "layouts must agree without page attention")
        require(sparse_block_size == 1 and sparse_mode in (0, 3), "sparse_block_size, sparse_mode")
        require(isinstance(scale_value, float), "scale_value is a double")
        contiguous(query, key, value, sparse_indices, query_rope, key_rope)
        shapes(layout_query, query, key)
        require(value.data_ptr() == key.data_ptr() and value.shape == key.shape, "key and value are the same data")
        require(query_rope.shape[:-1] == query.shape[:-1] and key_rope.shape[:-1] == key.shape[:-1], "rope shapes")
        self._indices(sparse_indices, query)
        if not self.wide:
            require(query.dtype in HALF and query.dtype == key.dtype == query_rope.dtype == key_rope.dtype, "half precision")
            require(query.shape[-2] in (1, 2, 4, 8, 16, 32, 64, 128), "heads")
            require(query.shape[-1] == 512 and query_rope.shape[-1] == 64 == key_rope.shape[-1], "D = 512, rope 64")
        documents = split(layout_query, actual_seq_lengths_query, query, as_tensor=True)
        same(actual_seq_lengths_query, actual_seq_lengths_kv)
        outs, highest, total = [], [], []
        for rows in documents:
            mask = selection(sparse_indices[rows].squeeze(-2), causal=sparse_mode == 3)
            logit = logits(query[rows], key[rows], query_rope[rows], key_rope[rows], scale_value, mask)
            top = logit.detach().amax(-1, keepdim=True)
            e = (logit - top).exp()
            outs.append(torch.einsum("nqk,kd->qnd", e / e.sum(-1, keepdim=True), up(value[rows].squeeze(-2))).to(query.dtype))
            highest.append(top[..., 0].T)
            total.append(e.detach().sum(-1).T)
        if not return_softmax_lse:
            require(not query.requires_grad, "training needs return_softmax_lse")
            return join(layout_query, outs), query.new_zeros(0), query.new_zeros(0)
        return join(layout_query, outs), statistics(layout_query, highest), statistics(layout_query, total)

    @torch.no_grad()
    def npu_sparse_lightning_indexer_grad_kl_loss(
        self, query, key, query_index, key_index, weights, sparse_indices, softmax_max, softmax_sum, scale_value, *,
        query_rope=None, key_rope=None, actual_seq_qlen=None, actual_seq_klen=None, layout="BSND", sparse_mode=3,
    ):  # fmt: skip
        self.calls.append(("kl", layout))
        require(sparse_mode == 3, "sparse_mode 3 only")
        contiguous(query, key, query_index, key_index, weights, sparse_indices, softmax_max, softmax_sum)
        shapes(layout, query, key)
        shapes(layout, query_index, key_index)
        self._indices(sparse_indices, query)
        require(not any(x.requires_grad for x in (query, key, query_index, key_index, weights)), "it computes gradients itself")
        batch = () if layout == "TND" else (query.shape[0],)
        wanted = (*batch, 1, query.shape[-3], query.shape[-2])
        require(tuple(softmax_max.shape) == wanted == tuple(softmax_sum.shape), f"softmax statistics are {wanted}")
        if not self.wide:
            require(query.dtype in HALF and query.dtype == key.dtype == query_index.dtype == key_index.dtype, "half precision")
            require(query_rope.dtype == query.dtype == key_rope.dtype, "half precision")
            require(softmax_max.dtype == torch.float32 == softmax_sum.dtype, "softmax statistics are fp32")
            require(weights.dtype in (torch.float32, query.dtype), "weights are fp32 or as query")
            require(query.shape[-2] in (32, 64, 128), f"attention heads are 32, 64 or 128, not {query.shape[-2]}")
            require(query_index.shape[-2] in (8, 16, 32, 64), "index heads")
            require(query.shape[-1] == 512 and query_rope.shape[-1] == 64 and query_index.shape[-1] == 128, "D, Dr")
            require(sparse_indices.shape[-1] in (1024, 2048, *LARGE), "K")
        require(actual_seq_qlen == actual_seq_klen, "lengths of queries and keys")
        documents = split(layout, actual_seq_qlen, query, as_tensor=False)
        require(len(documents) <= 256, "256 documents")
        gradients = [torch.zeros_like(x) for x in (query_index, key_index, weights)]
        loss = 0
        for rows in documents:
            mask = selection(sparse_indices[rows].squeeze(-2), causal=sparse_mode == 3)
            logit = logits(query[rows], key[rows], query_rope[rows], key_rope[rows], scale_value, mask)
            top, total = (x[*rows[:-1], 0, rows[-1]].T[..., None] for x in (softmax_max, softmax_sum))  # [N, S, 1]
            target = ((logit - top).exp() / total).sum(0)
            target = target / target.sum(-1, keepdim=True)
            with torch.enable_grad():
                leaves = [up(x[rows]).detach().requires_grad_() for x in (query_index, key_index.squeeze(-2), weights)]
                score = torch.einsum("qn,qnk->qk", leaves[2], torch.einsum("qnd,kd->qnk", *leaves[:2]).relu())
                guess = score.masked_fill(~mask, float("-inf")).log_softmax(-1).masked_fill(~mask, 0)
                kl = (torch.special.xlogy(target, target) - target * guess).sum()
                found = torch.autograd.grad(kl, leaves)
            loss = loss + kl.detach()
            for whole, part in zip(gradients, found, strict=True):
                whole[rows] = part.to(whole.dtype).view_as(whole[rows])
        return *gradients, loss.reshape(1).to(torch.promote_types(query.dtype, torch.float32))

    def _indices(self, indices: Tensor, query: Tensor) -> None:
        require(indices.dtype == torch.int32, "sparse_indices are int32")
        require(indices.shape[:-2] == query.shape[:-2] and indices.shape[-2] == 1, "sparse_indices are [.., 1, K]")
        used = indices >= 0
        require(bool((used[..., :-1] | ~used[..., 1:]).all()), "valid indices come first")
        require(bool((indices >= -1).all() and used[..., 0].all()), "-1 fills up a row")
        self.ascending &= bool(((indices[..., 1:] > indices[..., :-1]) | ~used[..., 1:]).all())


def up(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def contiguous(*tensors: Tensor) -> None:
    require(all(x.is_contiguous() for x in tensors), "non-contiguous tensors are not supported")


def shapes(layout: str, query: Tensor, key: Tensor) -> None:
    dims = {"BSND": 4, "TND": 3}[layout]
    require(query.dim() == dims == key.dim(), f"{layout} has {dims} dimensions")
    require(query.shape[: dims - 2] == key.shape[: dims - 2], "one key a query here")
    require(key.shape[-2] == 1 and query.shape[-1] == key.shape[-1], "one key head, of the query's size")


def same(a, b) -> None:
    require((a is None) == (b is None) and (a is None or torch.equal(a, b)), "lengths of queries and keys")


def split(layout: str, lengths, query: Tensor, *, as_tensor: bool) -> list[tuple]:
    """Index of each document's rows in [B, S, ..] or [T, ..]."""
    if lengths is not None:
        form = isinstance(lengths, Tensor) and lengths.dtype == torch.int32 and lengths.dim() == 1
        require(form if as_tensor else isinstance(lengths, list), "lengths: an int32 tensor, a list for the KL")
        lengths = [int(x) for x in lengths]
    if layout == "BSND":
        if lengths is not None:
            require(len(lengths) == len(query) and all(0 <= x <= query.shape[1] for x in lengths), "lengths of a batch")
            require(all(x == query.shape[1] for x in lengths), "the emulator has whole rows only")
        return [(row, slice(0, query.shape[1])) for row in range(len(query))]
    require(lengths is not None, "TND needs prefix sums")
    require(lengths[0] > 0 and lengths == sorted(lengths) and lengths[-1] == len(query), f"prefix sums without 0: {lengths}")
    return [(slice(begin, end),) for begin, end in pairwise([0, *lengths])]


def selection(indices: Tensor, causal: bool) -> Tensor:
    """[S, K] positions in the document -> bool [S, S]."""
    size = len(indices)
    require(bool((indices < size).all()), "an index beyond the document")
    mask = torch.zeros(size, size + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where(indices >= 0, indices, size).long(), True)
    return mask[:, :size].tril() if causal else mask[:, :size]


def logits(query, key, query_rope, key_rope, scale: float, mask: Tensor) -> Tensor:
    q, k = torch.cat([up(query), up(query_rope)], -1), torch.cat([up(key), up(key_rope)], -1).squeeze(-2)
    return (torch.einsum("qnd,kd->nqk", q, k) * scale).masked_fill(~mask, float("-inf"))


def join(layout: str, parts: list[Tensor]) -> Tensor:
    return torch.stack(parts) if layout == "BSND" else torch.cat(parts)


def statistics(layout: str, parts: list[Tensor]) -> Tensor:
    """[S, N] a document -> [B, 1, S, N] or [1, T, N]."""
    return torch.stack(parts)[:, None] if layout == "BSND" else torch.cat(parts)[None]
