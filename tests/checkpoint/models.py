"""A stand-in model: the right parameter names and shapes, nothing that computes."""

import torch
from torch import nn

from megatron_patch.checkpoint.hf_mapping import hybrid_mapping, sizes
from megatron_patch.model.architecture import Architecture, DsaSettings

DSA = DsaSettings(index_topk=16, index_n_heads=3, index_head_dim=16)


def stand_in(arch: Architecture, pattern: tuple[str, ...], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tree of modules with every megatron-core parameter of the pattern, filled with NaN; DSA layers require grad."""
    mapping = hybrid_mapping(arch, pattern)
    shapes = mapping.shapes(sizes(arch, DSA))
    root = nn.Module()
    for name, sources in mapping.entries.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        rows = sum(shapes[source][0] for source in sources)
        value = torch.full((rows, *shapes[sources[0]][1:]), torch.nan, dtype=dtype)
        layer = int(name.split(".")[2]) if name.startswith("decoder.layers.") else -1
        module.register_parameter(leaf, nn.Parameter(value, requires_grad=layer >= arch.num_layers))
    return root


def random_trained(arch: Architecture, pattern: tuple[str, ...], dtype: torch.dtype, seed: int = 7) -> dict:
    """Random values for what trains, by megatron-core name."""
    generator = torch.Generator().manual_seed(seed)
    model = stand_in(arch, pattern)
    return {
        name: (torch.randn(p.shape, generator=generator) * 0.05).to(dtype)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
