"""A published model's shape and its weights, layer by layer, for the judge."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_patch.errors import UserError
from megatron_patch.io.safetensors_dir import SafetensorsDir
from megatron_patch.model.architecture import Rope, read_config, read_rope

SIGMOID_FAMILIES = ("deepseek_v3", "deepseek_v32")


@dataclass(frozen=True)
class ModelShape:
    """What the judge must know beside the weights.

    Attributes:
        layers: decoder layers, the first `dense_layers` of which have no experts.
        vocabulary: rows of the embedding.
        latent_eps: of the norms of the latents, which published code fixes at 1e-6.
        index_topk, index_heads: of the indexers; None and 0 without.
        router_score: "softmax" or "sigmoid".
        open_groups: of `groups`, those a token may choose experts from.
    """

    layers: int
    dense_layers: int
    vocabulary: int
    hidden: int
    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    kv_rank: int
    eps: float
    rope: Rope
    index_topk: int | None
    index_heads: int
    experts: int
    experts_per_token: int
    routed_scaling: float
    router_score: str
    renormalise: bool
    groups: int
    open_groups: int
    latent_eps: float = 1e-6


def read_shape(directory: str | Path) -> ModelShape:
    """From config.json of a base, an export of either layout, or a DeepSeek-V3 or V3.2 model.

    Raises:
        UserError: no readable config.json, or a key is missing.
    """
    config = read_config(directory)
    sigmoid = config.get("model_type") in SIGMOID_FAMILIES and config.get("scoring_func", "sigmoid") == "sigmoid"
    greedy = config.get("topk_method", "greedy") == "greedy" and not sigmoid
    topk = config.get("dsa_index_topk") or config.get("index_topk")
    try:
        return ModelShape(
            layers=config["num_hidden_layers"],
            dense_layers=config.get("first_k_dense_replace") or 0,
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            nope_dim=config["qk_nope_head_dim"],
            rope_dim=config["qk_rope_head_dim"],
            value_dim=config["v_head_dim"],
            kv_rank=config["kv_lora_rank"],
            eps=config.get("rms_norm_eps", 1e-6),
            rope=read_rope(config, str(directory)),
            index_topk=topk,
            index_heads=(config.get("dsa_index_n_heads") or config.get("index_n_heads")) if topk else 0,
            experts=config["n_routed_experts"],
            experts_per_token=config["num_experts_per_tok"],
            routed_scaling=float(config.get("routed_scaling_factor", 1.0)),
            router_score="sigmoid" if sigmoid else "softmax",
            renormalise=bool(config.get("norm_topk_prob", sigmoid)),
            groups=1 if greedy else config.get("n_group") or 1,
            open_groups=1 if greedy else config.get("topk_group") or 1,
        )
    except KeyError as error:
        raise UserError(f"config.json must name the sizes of the model: {directory} lacks {error}; get it again") from None


class LayerWeights:
    """Tensors of one decoder layer by their name behind `model.layers.N.`, read when asked for.

    Args:
        source: the directory.
        layer: number of the layer.
        dtype: in which the judged side holds its weights; finer ones are rounded to it.
    """

    def __init__(self, source: SafetensorsDir, layer: int, dtype: torch.dtype):
        self.source, self.prefix, self.dtype = source, f"model.layers.{layer}.", dtype

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.source

    def __getitem__(self, name: str) -> Tensor:
        value = self.source.load(self.prefix + name)
        return value if name.endswith("e_score_correction_bias") else value.to(self.dtype)  # that one stays fp32
