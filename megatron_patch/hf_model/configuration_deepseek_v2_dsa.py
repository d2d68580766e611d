# SPDX-License-Identifier: Apache-2.0
"""Configurations of DeepSeek-V2 models with DeepSeek sparse attention (DSA) in some layers, or in all.

Some: the hybrid layout. `model_type` stays "deepseek_v2": transformers finds its table of expert weights by it. None of
its keys is called `index_topk`, because inference engines switch DSA on for ALL layers when they see that name.
All: the native layout, which those engines serve; its keys and its `model_type` are DeepSeek-V3.2's.
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
        if self.dsa_layers:
            _check_sizes(self, "dsa_")
        elif min(self.dsa_index_topk, self.dsa_index_n_heads, self.dsa_index_head_dim) < 1:
            raise ValueError("dsa_index_topk, dsa_index_n_heads and dsa_index_head_dim must be at least 1")

    @property
    def dsa_frozen_indexers(self) -> list[int]:
        """Layers whose indexers are `requires_grad=False`."""
        return []


class DeepseekV32SoftmaxConfig(DeepseekV2Config):
    """DeepSeek-V3.2's structure (a query latent and an indexer in every layer) with DeepSeek-V2's softmax routing.

    transformers' own `deepseek_v32` routes by sigmoid whatever `scoring_func` says.

    index_topk, index_n_heads, index_head_dim: as `dsa_index_*` above, for every layer. Engines read them.
    scoring_func: "softmax"; nothing else is implemented here.
    dsa_base_layers: how many layers, from the bottom, are a frozen base's.
    """

    model_type = "deepseek_v32"

    index_topk: int = 2048
    index_n_heads: int = 64
    index_head_dim: int = 128
    scoring_func: str = "softmax"
    dsa_base_layers: int = 0

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if not self.q_lora_rank:
            raise ValueError(f"a model whose layers are all DSA has a query latent: q_lora_rank is {self.q_lora_rank}")
        if self.scoring_func != "softmax" or self.topk_method != "greedy":
            raise ValueError(
                "this code routes greedily by softmax: the configuration wants scoring_func "
                f"{self.scoring_func!r}, topk_method {self.topk_method!r}; transformers' own deepseek_v32 is for those"
            )
        if not 0 <= self.dsa_base_layers <= self.num_hidden_layers:
            raise ValueError(f"dsa_base_layers must be 0 to {self.num_hidden_layers}: {self.dsa_base_layers}")
        _check_sizes(self, "")

    # What the model code asks for, by the hybrid's names.
    @property
    def dsa_layers(self) -> list[int]:
        return list(range(self.num_hidden_layers))

    @property
    def dsa_index_topk(self) -> int:
        return self.index_topk

    @property
    def dsa_index_n_heads(self) -> int:
        return self.index_n_heads

    @property
    def dsa_index_head_dim(self) -> int:
        return self.index_head_dim

    @property
    def dsa_q_rank(self) -> int:
        return self.q_lora_rank

    @property
    def dsa_frozen_indexers(self) -> list[int]:
        # All: no gradient reaches an indexer in this code. FSDP1 would give those that require one a gradient of zeros,
        # and weight decay would shrink them.
        return self.dsa_layers


def _check_sizes(config: DeepseekV2Config, prefix: str) -> None:
    names = [f"{prefix}index_{name}" for name in ("topk", "n_heads", "head_dim")]
    sizes = [getattr(config, name) for name in names]
    if min(sizes) < 1:
        raise ValueError(f"{names[0]}, {names[1]} and {names[2]} must be at least 1")
    if sizes[2] < config.qk_rope_head_dim:
        raise ValueError(f"{names[2]} = {sizes[2]} must hold qk_rope_head_dim = {config.qk_rope_head_dim}")


__all__ = ["DeepseekV2DsaConfig", "DeepseekV32SoftmaxConfig"]
