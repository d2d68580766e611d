"""Global names: what a parameter is called on whichever rank it lies.

megatron-core numbers a module's layers and experts from 0 on each rank. Whatever crosses ranks or goes to disk uses the
numbers of the whole model instead: initial values, checkpoints, hashes.
"""

import re

from torch import Tensor, nn

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")


def local_experts(num_experts: int, expert_parallel: int, rank: int) -> range | None:
    """Global numbers of the experts of a rank among `expert_parallel`; None: all of them."""
    if expert_parallel == 1:
        return None
    each = num_experts // expert_parallel
    return range(rank * each, (rank + 1) * each)


def global_name(name: str, experts: range | None = None, layer_offset: int = 0) -> str:
    """The global name of what is called `name` in a model that holds `experts` (None: all) from layer `layer_offset` on."""
    name = name.removeprefix("module.")
    if layer_offset and (match := _LAYER.fullmatch(name)):
        name = f"{match[1]}{int(match[2]) + layer_offset}{match[3]}"
    if experts is not None and (match := _EXPERT.fullmatch(name)):
        name = f"{match[1]}{int(match[2]) + experts.start}{match[3]}"
    return name


def expert_number(name: str) -> int | None:
    """The number of the routed expert in a name; None: the parameter belongs to none."""
    match = _EXPERT.fullmatch(name)
    return int(match[2]) if match else None


def global_parameters(
    model: nn.Module, experts: range | None = None, layer_offset: int = 0
) -> dict[str, nn.Parameter]:
    """The model's parameters by global name, in the model's order."""
    return {global_name(name, experts, layer_offset): p for name, p in model.named_parameters()}


def trainable(model: nn.Module, experts: range | None = None) -> dict[str, Tensor]:
    """What trains, by global name, in the model's order."""
    return {name: p for name, p in global_parameters(model, experts).items() if p.requires_grad}
