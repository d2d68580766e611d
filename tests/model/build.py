"""Build a loaded model in one line."""

from pathlib import Path

import torch

from megatron_patch.checkpoint.load_base import load_base
from megatron_patch.model.architecture import DsaSettings, read_architecture
from megatron_patch.model.builder import BuildSettings, build_model
from megatron_patch.model.freeze import freeze_base
from megatron_patch.model.initialize import initialize_dsa_layers
from megatron_patch.model.layer_pattern import appended_pattern
from megatron_patch.ops.backends import DsaBackend, choose_backend

TINY_DSA = DsaSettings(index_topk=8, index_n_heads=4, index_head_dim=16)


def tiny_model(
    base: Path,
    dsa_layers: int = 2,
    *,
    init: str = "identity",
    dtype: torch.dtype = torch.float32,
    dsa: DsaSettings = TINY_DSA,
    std: float = 0.1,
    aux_loss_coeff: float = 0.0,
    freeze: bool = True,
    recompute: bool = False,
    backend: str | DsaBackend = "auto",
    **config_overrides,
):
    """(model, state, pattern), base loaded, DSA layers initialised, base frozen."""
    arch = read_architecture(base)
    pattern = appended_pattern(arch.num_layers, dsa_layers)
    build = BuildSettings(dtype=dtype, aux_loss_coeff=aux_loss_coeff, recompute_dsa=recompute)
    chosen = choose_backend(backend, "cpu") if isinstance(backend, str) else backend
    model, state = build_model(arch, pattern, dsa, build, chosen, **config_overrides)
    load_base(model, base, arch, pattern, progress=False)
    initialize_dsa_layers(model, pattern, init, std=std, seed=3)
    if freeze:
        freeze_base(model, pattern)
    return model, state, pattern
