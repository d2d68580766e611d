"""What `auto` means on a CPU: the sparse op for a pack with a long document, the chunked one for a pack of short ones.

The two compute the same (`reference.dsa_attention`) and differ in the order of sums. A pack of short documents is cheaper in whole
chunks: all of its keys are few, and the sparse op's many small products cost more to start than they save. A short document beside
a long one is summed in the sparse op's order: its values then differ in the last bits from those that it has among short ones.
"""

from torch import Tensor

from megatron_patch.ops import chunked, sparse
from megatron_patch.ops.reference import DsaOutput

# `benchmarks/dsa_layer.py --parts lengths` measures where the sparse op begins to win.
LONG_DOCUMENT = 256


def dsa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    index_weights: Tensor,
    cu_seqlens: Tensor,
    **options: object,
) -> DsaOutput:
    """`sparse.dsa_attention` where a document is longer than LONG_DOCUMENT tokens, else `chunked.dsa_attention`.

    Arguments, result and what is raised are theirs.
    """
    long = cu_seqlens.dim() == 1 and len(cu_seqlens) > 1 and int(cu_seqlens.diff().max()) > LONG_DOCUMENT
    attention = (sparse if long else chunked).dsa_attention
    return attention(query, key, value, index_query, index_key, index_weights, cu_seqlens, **options)
