"""Attention of queries over their selected keys alone, one head at a time, without gathering keys: for long documents.

The selection of a block of queries is a sparse matrix pattern. Logits are a product sampled at the pattern
(`compiled.sampled_product`, `torch.sparse.sampled_addmm`), sums over a query's keys are weighted embedding bags, and sums over a key's
queries, which the gradients of keys and values are, become such bags over the transposed pattern, sorted once per block for all heads.

Shape letters: those of reference.py, and R queries of a block, K keys of the document, P pairs (R x S).
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_patch.ops.compiled import sampled_product
from megatron_patch.ops.products import head
from megatron_patch.ops.reference import wide

# Columns of a value at once in a bag: 4,096 rows of them fit a second-level cache, which the random reads then stay in.
BAG_DIMS = 64
# A sampled product goes by halves of the columns where its right factor is larger: 37 instead of 50 ns a pair at 16,384 keys.
SAMPLED_BYTES = 4 * 2**20
PAIRS_A_KEY = 64  # of a block: as many pairs as make a transposed bag worth its sum over all keys


def block_rows(keys: int, slots: int) -> int:
    """How many queries a block has: its memory is a multiple of the document's length, whatever the number of slots."""
    return PAIRS_A_KEY * keys // slots


class Pattern:
    """Which keys each query of a block takes.

    Args:
        chosen_RS: int32 [R, S], positions in the document, -1 at the tail and nowhere else.
        keys: K.
        dtype: of the sampled products.
    """

    def __init__(self, chosen_RS: Tensor, keys: int, dtype: torch.dtype):
        self.unused_RS = chosen_RS < 0
        if not bool(self.unused_RS.any()):
            self.unused_RS = None
        else:  # point them at a key that the query has anyway, if it has one; their weight is zero
            chosen_RS = torch.where(self.unused_RS, chosen_RS[:, :1].clamp(min=0), chosen_RS)
        self.chosen_RS, self.keys = chosen_RS.contiguous(), keys
        rows, slots = chosen_RS.shape
        begins = torch.arange(0, rows * slots + 1, slots, dtype=torch.int32, device=chosen_RS.device)
        values = torch.zeros(rows * slots, dtype=dtype, device=chosen_RS.device)
        with warnings.catch_warnings():  # PyTorch says that sparse CSR is in beta
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
            self.sampled = torch.sparse_csr_tensor(
                begins, self.chosen_RS.flatten(), values, size=(rows, keys), check_invariants=False
            )

    def sample(self, left: Tensor, right: Tensor) -> Tensor:
        """left [R, D] . right [K, D] at the pattern: [R, S], overwritten by the next call. Wide, contiguous inputs."""
        value_RS = self.sampled.values().view_as(self.chosen_RS)
        if sampled_product(left, right, self.chosen_RS, value_RS):
            return value_RS
        size = right.numel() * right.element_size()
        step = -(-right.shape[1] // 2) if size > SAMPLED_BYTES else right.shape[1]
        self.sampled.values().zero_()  # PyTorch multiplies the old values by beta, 0 too: NaN and infinities would stay
        for number, (a, b) in enumerate(zip(left.split(step, 1), right.split(step, 1), strict=True)):
            torch.sparse.sampled_addmm(
                self.sampled, a.contiguous(), b.contiguous().T, beta=float(number > 0), out=self.sampled
            )
        return value_RS

    def softmax(self, left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        """Probabilities [R, S] from the sampled product, written to `out`; zero at the tail."""
        logit_RS = self.sample(left, right)
        if self.unused_RS is not None:
            logit_RS.masked_fill_(self.unused_RS, float("-inf"))
        return torch.softmax(logit_RS, -1, out=out)

    def sum_over_keys(self, weight_RS: Tensor, value: Tensor, out: Tensor) -> None:
        """out [R, D] = sum_s weight[r, s] value[chosen[r, s]], rounded to out's dtype; value [K, D] of any dtype."""
        for begin in range(0, value.shape[1], BAG_DIMS):
            part = slice(begin, begin + BAG_DIMS)
            out[:, part] = F.embedding_bag(
                self.chosen_RS, wide(value[:, part]).contiguous(), per_sample_weights=weight_RS, mode="sum"
            )

    def transpose(self) -> None:
        """Prepare `add_over_queries`."""
        place_P = self.chosen_RS.flatten()
        # Stable: the order of each key's queries, and with it the order of its sum, depends on nothing else.
        self.order_P = torch.sort(place_P, stable=True).indices.int()
        counts_K = torch.bincount(place_P, minlength=self.keys)
        self.begin_K = (counts_K.cumsum(0) - counts_K).int()
        self.query_P = self.order_P // self.chosen_RS.shape[1]

    def add_over_queries(self, weight_RS: Tensor, value: Tensor, out: Tensor) -> None:
        """out [K, D] += sum of weight[r, s] value[r] over the pairs with chosen[r, s] = k; value [R, D] wide."""
        weight_P = weight_RS.flatten().index_select(0, self.order_P)
        for begin in range(0, value.shape[1], BAG_DIMS):
            part = slice(begin, begin + BAG_DIMS)
            out[:, part] += F.embedding_bag(
                self.query_P, value[:, part].contiguous(), self.begin_K, per_sample_weights=weight_P, mode="sum"
            )


def attend(
    query: Tensor, key: Tensor, value: Tensor, chosen_RS: Tensor, softmax_scale: float, out: Tensor
) -> Tensor:
    """Attention of a block of queries.

    Args:
        query: [R, H, D].
        key, value: [K, H, D] and [K, H, V], of the document.
        chosen_RS: int32 [R, S], positions in the document, -1 at the tail.
        out: [R, H, V], written.

    Returns:
        p [R, S], the probabilities summed over heads and normalised; zero at the tail.
    """
    dtype = wide(query[:0]).dtype
    pattern = Pattern(chosen_RS, len(key), dtype)
    target_RS = torch.zeros(chosen_RS.shape, dtype=dtype, device=query.device)
    prob_RS = torch.empty_like(target_RS)
    for h in range(query.shape[1]):
        pattern.softmax(head(query, h) * softmax_scale, head(key, h), prob_RS)
        pattern.sum_over_keys(prob_RS, value[:, h], out[:, h])
        target_RS += prob_RS
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
    pattern = Pattern(chosen_RS, len(key), d_key.dtype)
    pattern.transpose()
    prob_RS = d_key.new_empty(chosen_RS.shape)
    for h in range(query.shape[1]):
        scaled_RD, d_out_RV = head(query, h) * softmax_scale, head(d_out, h)
        pattern.softmax(scaled_RD, head(key, h), prob_RS)
        pattern.add_over_queries(prob_RS, d_out_RV, d_value[:, h])
        d_logit_RS = pattern.sample(d_out_RV, head(value, h)).mul_(prob_RS)
        d_logit_RS.addcmul_(prob_RS, d_logit_RS.sum(-1, keepdim=True), value=-1)
        pattern.add_over_queries(d_logit_RS, scaled_RD, d_key[:, h])
        pattern.sum_over_keys(d_logit_RS.mul_(softmax_scale), key[:, h], d_query[:, h])
