"""Which layers of a model are mixtures of experts, read from its config.json."""

from dataclasses import dataclass
from pathlib import Path

from megatron_patch.errors import UserError
from megatron_patch.pruning.config_json import read_config

# transformers' class by model_type. Named, not found through auto_map: a published checkpoint may bring code of its own,
# which is never run.
CLASSES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
}


@dataclass(frozen=True)
class MoeLayers:
    """The MoE layers of a model.

    Attributes:
        model_type: of config.json.
        num_layers: decoder layers, without MTP.
        layers: numbers of the MoE layers among them, ascending.
        num_experts: routed experts of each.
        top_k: experts that a token is sent to.
    """

    model_type: str
    num_layers: int
    layers: tuple[int, ...]
    num_experts: int
    top_k: int


def read_moe_layers(directory: str | Path) -> MoeLayers:
    """The MoE layers that config.json describes.

    Raises:
        UserError: an unknown model_type, or a config without the needed keys.
    """
    config = read_config(directory)
    model_type = config.get("model_type")
    if model_type not in CLASSES:
        raise UserError(f"model_type must be one of {', '.join(CLASSES)}: {directory} has {model_type!r}")
    try:
        number, experts, top_k = (int(config[k]) for k in ("num_hidden_layers", "n_routed_experts", "num_experts_per_tok"))
        # V4 has no dense layer and none of these keys.
        dense, every = int(config.get("first_k_dense_replace") or 0), int(config.get("moe_layer_freq") or 1)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"config.json must give layers, experts and top-k as numbers: {directory}: {error}; download it again"
        ) from None
    layers = tuple(i for i in range(dense, number) if i % every == 0)
    if not layers or not 0 < top_k <= experts:
        raise UserError(
            f"a model to prune has MoE layers and 0 < top-k <= experts: {directory} has {len(layers)} MoE layers, top-k "
            f"{top_k}, {experts} experts; check --model"
        )
    return MoeLayers(str(model_type), number, layers, experts, top_k)
