# SPDX-License-Identifier: Apache-2.0
"""Configuration of a DeepSeek-V2 model in which some layers use DeepSeek sparse attention (DSA).

`model_type` stays "deepseek_v2": transformers finds its table of expert weights by it. None of the new keys is called
`index_topk`, because inference engines switch DSA on for ALL layers when they see that name.
"""

from transformers import DeepseekV2Config


class DeepseekV2DsaConfig(DeepseekV2Config):
    """DeepSeek-V2's configuration and five keys.

    dsa_layers: numbers of the layers (0-based) whose attention is DSA. They have a low-rank query projection
        (`q_a_proj`, `q_a_layernorm`, `q_b_proj`) and an `indexer`; all other layers are what `q_lora_rank` says.
    dsa_index_topk: how many keys a query of a DSA layer attends to.
    dsa_index_n_heads, dsa_index_head_dim: sizes of the indexer. The first `qk_rope_head_dim` dims of each head are
        rotated.
    dsa_q_rank: rank of the query latent of DSA layers; null means `hidden_size`.
    """

    model_type = "deepseek_v2"

    dsa_layers: list[int] | None = None
    dsa_index_topk: int = 2048
    dsa_index_n_heads: int = 64
    dsa_index_head_dim: int = 128
    dsa_q_rank: int | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.dsa_layers = sorted(self.dsa_layers or [])
        wrong = [i for i in self.dsa_layers if not 0 <= i < self.num_hidden_layers]
        if wrong or len(set(self.dsa_layers)) != len(self.dsa_layers):
            raise ValueError(
                f"dsa_layers must be distinct and below num_hidden_layers = {self.num_hidden_layers}: {self.dsa_layers}"
            )
        if min(self.dsa_index_topk, self.dsa_index_n_heads, self.dsa_index_head_dim) < 1:
            raise ValueError("dsa_index_topk, dsa_index_n_heads and dsa_index_head_dim must be at least 1")
        if self.dsa_layers and self.dsa_index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"dsa_index_head_dim = {self.dsa_index_head_dim} must hold qk_rope_head_dim = {self.qk_rope_head_dim}"
            )


__all__ = ["DeepseekV2DsaConfig"]
