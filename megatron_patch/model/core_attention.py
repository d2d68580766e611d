"""The base layers' attention on `F.scaled_dot_product_attention`, document by document.

megatron-core's `DotProductAttention` has no parameters for MLA's unequal head sizes, and no packed sequences
(transformer/dot_product_attention.py, 0.16.1); Transformer Engine's exists on CUDA only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Shapes: T tokens of the pack, H heads (of this rank), D head size of query and key, V head size of the value.


class SdpaCoreAttention(nn.Module):
    """Causal attention inside each document of a pack.

    Args follow megatron-core's core attention; only `softmax_scale` is used.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
    ):
        super().__init__()
        if pg_collection.cp.size() != 1:
            raise ValueError(
                f"SdpaCoreAttention runs without context parallelism: its size is {pg_collection.cp.size()}"
            )
        # None in the instance that Attention.__init__ builds first, and MLA's constructor replaces.
        self.softmax_scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask, *, packed_seq_params, attn_mask_type=None
    ) -> Tensor:
        """query, key [T, H, D], value [T, H, V] -> [T, H * V].

        Raises:
            ValueError: no `packed_seq_params`: every batch of this code base says where its documents are.
        """
        if packed_seq_params is None:
            raise ValueError("SdpaCoreAttention needs packed_seq_params: one document is cu_seqlens [0, T]")
        out = causal_attention(query, key, value, packed_seq_params.cu_seqlens_q, self.softmax_scale)
        return out.flatten(1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, softmax_scale: float) -> Tensor:
    """Causal softmax attention of each document with itself.

    Args:
        query, key: [T, H, D]; value: [T, H, V] with V <= D.
        cu_seqlens: int [n + 1], document boundaries, first 0, last T.
        softmax_scale: factor on the scores.

    Returns:
        [T, H, V] in the value's dtype.
    """
    size = value.size(-1)
    # The fused kernels want equal head sizes; with unequal ones SDPA falls to the path that holds H x T x T scores.
    value = F.pad(value, (0, query.size(-1) - size))
    lengths = cu_seqlens.diff().tolist()
    if len(set(lengths)) == 1:  # equal documents are a batch
        q, k, v = (t.unflatten(0, (len(lengths), -1)).transpose(1, 2) for t in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale)
        return out.transpose(1, 2).flatten(0, 1)[..., :size]
    outs = []
    for q, k, v in zip(*(t.split(lengths) for t in (query, key, value)), strict=True):
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale)
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)[..., :size]
