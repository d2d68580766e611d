"""A checkpoint of the V2-Lite-sized run holds what trains and its state, not the base: counted without allocating."""

from types import SimpleNamespace

import torch

from megatron_patch.checkpoint.save import gather_weights
from megatron_patch.model.architecture import DsaSettings, read_architecture
from megatron_patch.model.builder import BuildSettings, build_model
from megatron_patch.model.freeze import freeze_base
from megatron_patch.model.layer_pattern import appended_pattern
from megatron_patch.ops.backends import choose_backend
from megatron_patch.training.state import optimizer_tensors, pieces_of
from tests.planning.test_parameters import V2_LITE

TRAINABLE = 1_212_429_824
PARTS = ("main", "exp_avg", "exp_avg_sq")


def test_v2_lite(device):
    arch = read_architecture(V2_LITE)
    pattern = appended_pattern(arch.num_layers, 2)
    with torch.device("meta"):
        model, _ = build_model(
            arch, pattern, DsaSettings(2048, 64, 128), BuildSettings(dtype=torch.bfloat16), choose_backend("auto", "cpu")
        )
    freeze_base(model, pattern)
    weights = gather_weights(model, None)
    assert sum(p.numel() for p in model.parameters()) > 16e9
    assert sum(t.numel() for t in weights.values()) == TRAINABLE
    assert all(tensor.is_meta for tensor in weights.values()), "something was allocated"
    for parameter in weights.values():  # as megatron-core's mixed-precision optimizer does
        parameter.main_param = parameter.detach().float()
    inner = torch.optim.AdamW([parameter.main_param for parameter in weights.values()], foreach=False)
    for own in inner.param_groups[0]["params"]:
        own.grad = torch.empty_like(own)
    inner.step()
    tensors = optimizer_tensors(pieces_of(model, SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)]), None))
    held = {part: sum(t.numel() for name, t in tensors.items() if name.startswith(f"{part}/")) for part in PARTS}
    assert held == dict.fromkeys(PARTS, TRAINABLE)
    steps = [tensor for name, tensor in tensors.items() if name.startswith("step/")]
    assert len(steps) == len(weights) and len(tensors) == 4 * len(weights)
