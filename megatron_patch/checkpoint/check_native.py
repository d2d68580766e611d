"""What `dsa-upcycle check` asks of the native layout alone: the base's layers compute what they did, up to one eps."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_patch.checkpoint.export import MANIFEST_FILE
from megatron_patch.checkpoint.native_weights import eps_factor, is_neutral, layer_prefix, query_latent
from megatron_patch.claims import Failed
from megatron_patch.io.safetensors_dir import SafetensorsDir
from megatron_patch.io.strict_json import read_json
from megatron_patch.model.architecture import read_architecture

NEUTRAL, TRAINED = "neutral", "trained"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """As bytes: NaN and negative zero count."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def native_layers(export: Path, base: Path) -> str:
    """Latents made of the base's norms, and indexers that are what the manifest calls them."""
    layers, tensors, source = read_architecture(base).num_layers, SafetensorsDir(export), SafetensorsDir(base)
    try:
        label = read_json(export / MANIFEST_FILE)["native"]["base_indexers"]["kind"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Failed(f"{MANIFEST_FILE} does not say what the base's indexers are: {error!r}") from None
    neutral = True
    for layer in range(layers):
        norm = source.load(f"model.layers.{layer}.input_layernorm.weight")
        for name, expected in query_latent(norm).items():
            name = layer_prefix(layer) + name
            if name not in tensors or not same_bits(tensors.load(name), expected):
                raise Failed(f"{name} is not made of the base's norm weights")
        indexer = [name for name in tensors if name.startswith(layer_prefix(layer) + "indexer.")]
        neutral = neutral and all(is_neutral(name, tensors.load(name)) for name in indexer)
    if label != (NEUTRAL if neutral else TRAINED):
        raise Failed(f"the base's indexers are {NEUTRAL if neutral else 'not ' + NEUTRAL}, the manifest calls them {label!r}")
    return f"{layers} latents made of the base's norms; indexers {label}"


@contextmanager
def input_variances(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Within the block, keep the mean square of every layer's input: layer -> fp32 [tokens], of the last pass."""
    found: dict[int, Tensor] = {}

    def hook(layer: int):
        return lambda _module, inputs: found.update({layer: inputs[0].detach().float().square().mean(-1).flatten()})

    handles = [
        layer.input_layernorm.register_forward_pre_hook(hook(i)) for i, layer in enumerate(model.base_model.layers)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def describe_eps(variances: dict[int, Tensor], config) -> str:
    """How far the second eps moves the queries of the base's layers, over the tokens of one pass."""
    off = {i: float((eps_factor(v, config.rms_norm_eps) - 1).abs().max()) for i, v in variances.items()}
    worst = max(range(config.dsa_base_layers), key=lambda i: off[i])
    return f"|f(v) - 1| of the base's query latents at most {off[worst]:.1e}, in layer {worst}"
