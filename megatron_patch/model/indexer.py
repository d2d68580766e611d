"""The lightning indexer: small queries and keys that score, for each token, which earlier tokens to attend to.

DeepSeek-V3.2 report, section 2.1, equation 1; the layout is that of the released reference (after its RoPE fix):
the first `qk_rope_head_dim` dimensions of index queries and keys carry half-split RoPE, although MLA's own RoPE is
interleaved; queries come from the *normed* query latent; keys pass a LayerNorm with bias, fp32, eps 1e-6.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_patch.model.architecture import DsaSettings
from megatron_patch.model.layers import Fp32LayerNorm
from megatron_patch.ops.rope import apply_rope_half_split

KEY_NORM_EPS = 1e-6

# Shapes: T tokens, D hidden, R query-latent rank, I index heads, E index head size, P RoPE dimensions.


class IndexInputs(NamedTuple):
    """What `ops` scores keys with: query [T, I, E] and key [T, E] in the model's dtype, weights [T, I] fp32."""

    query: Tensor
    key: Tensor
    weights: Tensor


class LightningIndexer(nn.Module):
    """Computes `IndexInputs`; the parameters are whole on every rank.

    It learns from the indexer's KL loss alone: `forward` detaches its inputs, so that no gradient of that loss
    reaches the model, whatever the caller does.

    Args:
        hidden_size: D.
        q_rank: R, size of the query latent.
        settings: number and size of the index heads.
        dtype: of the parameters; k_norm and weights_proj are computed in fp32 all the same.
    """

    def __init__(self, hidden_size: int, q_rank: int, settings: DsaSettings, dtype: torch.dtype):
        super().__init__()
        self.n_heads, self.head_dim = settings.index_n_heads, settings.index_head_dim
        self.wq_b = nn.Linear(q_rank, self.n_heads * self.head_dim, bias=False, dtype=dtype)
        self.wk = nn.Linear(hidden_size, self.head_dim, bias=False, dtype=dtype)
        self.k_norm = Fp32LayerNorm(self.head_dim, KEY_NORM_EPS, dtype)
        self.weights_proj = nn.Linear(hidden_size, self.n_heads, bias=False, dtype=dtype)

    def forward(self, hidden: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor) -> IndexInputs:
        """hidden [T, D] (after the input norm), q_latent [T, R] (after its norm), cos and sin [T, P / 2] fp32."""
        hidden, q_latent = hidden.detach(), q_latent.detach()
        query_TIE = self.wq_b(q_latent).unflatten(-1, (self.n_heads, self.head_dim))
        query_TIE = apply_rope_half_split(query_TIE.float(), cos, sin).to(hidden.dtype)
        key_TE = apply_rope_half_split(self.k_norm(self.wk(hidden)), cos, sin).to(hidden.dtype)
        weights_TI = F.linear(hidden.float(), self.weights_proj.weight.float())
        return IndexInputs(query_TIE, key_TE, weights_TI * (self.n_heads * self.head_dim) ** -0.5)
