"""Which layers of a model are mixtures of experts, read from its config.json."""

from dataclasses import dataclass
from pathlib import Path

from megatron_patch.errors import UserError
from megatron_patch.pruning.config_json import read_config, whole
from megatron_patch.pruning.families import family_of


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
    config = read_config(Path(directory))
    family = family_of(config)
    routing, layers = family.routing(config), family.moe_layers(config)
    if not layers:
        raise UserError(f"a model to prune must have MoE layers: config.json of {directory} describes none; check --model")
    number = whole(config, "num_hidden_layers", least=1)
    return MoeLayers(family.model_type, number, layers, routing.experts, routing.top_k)
