"""Initialise the DSA layers from the base that was just loaded.

`identity` (default): a copy of the base's last layer with its out-projections zeroed (LLaMA-Pro, arXiv 2401.02415),
so that step 0 equals the base exactly; `copy`: without the zeros; `random`.
"""

import hashlib
import re

import torch
from torch import Tensor, nn

from megatron_patch.errors import UserError
from megatron_patch.model.layer_pattern import DSA
from megatron_patch.model.names import global_name

IDENTITY, COPY, RANDOM = "identity", "copy", "random"

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Where a layer writes to the residual stream. All three are needed: with the shared experts' forgotten, a copied
# layer moves logits by more than one.
_OUT_PROJECTION = re.compile(
    r"(self_attention\.linear_proj|mlp\.(linear_fc2|shared_experts\.linear_fc2|experts\.local_experts\.\d+\.linear_fc2))"
    r"\.weight"
)
_INDEXER = "self_attention.indexer."


@torch.no_grad()
def initialize_dsa_layers(
    model: nn.Module, pattern: tuple[str, ...], how: str, *, std: float, seed: int, local_experts: range | None = None
) -> None:
    """Fill every parameter of the DSA layers, each exactly once.

    Args:
        model: from `build_model`, base loaded.
        pattern: one entry a layer.
        how: identity, copy or random.
        std: of random matrices (the base's `initializer_range`).
        seed: of random values; each parameter draws from its own stream, named by its global name, so that the
            values do not depend on the parallel layout.
        local_experts: global numbers of this rank's experts; None: all.

    Raises:
        UserError: a zero in the base's norm weights, which the query latent cannot represent; or unknown `how`.
    """
    if how not in (IDENTITY, COPY, RANDOM):
        raise UserError(f"--dsa-init must be identity, copy or random: {how!r}")
    layers = _parameters_by_layer(model)
    last_base = layers[max(i for i, kind in enumerate(pattern) if kind != DSA)]
    for i, kind in enumerate(pattern):
        if kind != DSA:
            continue
        for name, parameter in layers[i].items():
            if how == RANDOM or name.startswith(_INDEXER):
                value = _drawn(f"{seed}:{i}.{global_name(name, local_experts)}", name, parameter, std)
            elif how == IDENTITY and _OUT_PROJECTION.fullmatch(name):
                value = torch.zeros_like(parameter)
            else:
                value = _copied(name, last_base)
            if value.shape != parameter.shape:
                raise ValueError(f"layer {i}, {name}: shape {tuple(value.shape)}, expected {tuple(parameter.shape)}")
            parameter.copy_(value)


@torch.no_grad()
def initialize_base_indexers(model: nn.Module, *, std: float, seed: int) -> None:
    """Draw the indexers that stand beside a base's layers, as those of DSA layers are drawn.

    Raises:
        UserError: a zero in the base's norm weights, which their query latent cannot represent.
    """
    for i, layer in _parameters_by_layer(model).items():
        zeros = int((layer["input_layernorm.weight"] == 0).sum())
        if zeros:
            raise UserError(
                f"an indexer reads a query latent, which divides by the base's norm weights: input_layernorm of layer {i} "
                f"has {zeros} zeros; this base cannot have indexers in its layers, leave --train base-indexers out"
            )
        for name, parameter in layer.items():
            if name.startswith(_INDEXER):
                parameter.copy_(_drawn(f"{seed}:{i}.{name}", name, parameter, std))


def _parameters_by_layer(model: nn.Module) -> dict[int, dict[str, nn.Parameter]]:
    layers: dict[int, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        match = _LAYER.fullmatch(name)
        if match:
            layers.setdefault(int(match[1]), {})[match[2]] = parameter
    return layers


def _copied(name: str, base: dict[str, nn.Parameter]) -> Tensor:
    """The base layer's value; the query latent, which the base has not, is written so that it changes nothing.

    The attention's input is x * w with x normalised and w = input_layernorm. q_down = diag(1/w) takes w off,
    q_layernorm = w puts it on again after normalising x a second time, and q_up is the plain projection.
    """
    norm = base["input_layernorm.weight"]
    if name == "self_attention.linear_q_down_proj.weight":
        zeros = int((norm == 0).sum())
        if zeros:
            raise UserError(
                f"the query latent divides by the base's norm weights: input_layernorm of its last layer has {zeros} "
                "zeros; use --dsa-init random"
            )
        return torch.diag(1 / norm.float()).to(norm.dtype)
    if name == "self_attention.q_layernorm.weight":
        return norm
    if name == "self_attention.linear_q_up_proj.weight":
        return base["self_attention.linear_q_proj.weight"]
    return base[name]


def _drawn(stream: str, name: str, parameter: Tensor, std: float) -> Tensor:
    """Norms start as the identity; matrices are normal with `std`."""
    if parameter.dim() == 1:
        return torch.zeros_like(parameter) if name.endswith(".bias") else torch.ones_like(parameter)
    seed = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little") >> 1
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(parameter.shape, dtype=torch.float32).normal_(0, std, generator=generator).to(parameter.dtype)
