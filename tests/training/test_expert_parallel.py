"""Experts spread over two ranks (gloo): a step's loss and gradients are those of one process, parameter by parameter.

Whole runs are in test_expert_parallel_runs.py.
"""

import pytest
import torch
from megatron.core import parallel_state

from megatron_patch.checkpoint.load_base import load_base
from megatron_patch.devices import ranks
from megatron_patch.devices.device import activate, initialize_distributed
from megatron_patch.model.architecture import read_architecture
from megatron_patch.model.builder import BuildSettings, build_model
from megatron_patch.model.freeze import freeze_base
from megatron_patch.model.initialize import initialize_dsa_layers
from megatron_patch.model.layer_pattern import appended_pattern
from megatron_patch.ops.backends import choose_backend
from megatron_patch.training.optimizer import build_optimizer, wrap_ddp
from megatron_patch.training.step import TrainStep
from tests.model.build import TINY_DSA
from tests.training.rank_runs import leave_groups
from tests.training.test_step import batches, no_flops

ROWS = [(30, 3), (40, 20), (22, 1), (35, 9)]


def step_of(base, settings, stage: str, expert_parallel: int, number: int, count: int):
    """(loss, KL, gradient norm, gradients by global name) of one step, this rank taking each `count`th micro-batch."""
    arch = read_architecture(base)
    pattern = appended_pattern(arch.num_layers, 2)
    build = BuildSettings(expert_parallel=expert_parallel)
    model, state = build_model(arch, pattern, TINY_DSA, build, choose_backend("auto", "cpu"))
    local = arch.num_experts // expert_parallel
    first = number * local if expert_parallel > 1 else 0
    load_base(model, base, arch, pattern, progress=False, local_experts=range(first, first + local))
    initialize_dsa_layers(model, pattern, "copy", std=0.1, seed=3, local_experts=range(first, first + local))
    freeze_base(model, pattern)
    ddp = wrap_ddp(model, use_distributed_optimizer=False)
    optimizer = build_optimizer(ddp, settings, bf16=False, use_distributed_optimizer=False)
    step = TrainStep(ddp, optimizer, state, activate("cpu"), 0.7, no_flops)
    result = step(batches(ROWS, 1)[number::count], stage)
    grads = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            before, found, after = name.partition(".local_experts.")
            if found:
                expert, _, rest = after.partition(".")
                name = f"{before}{found}{int(expert) + first}.{rest}"
            grads[name] = parameter.main_grad.clone()
    return result.lm_loss, result.indexer_kl, result.grad_norm, grads


def step_on_ranks(base, settings, stage: str):
    """On two ranks, with groups of their own for the call."""
    try:
        leave_groups()
        initialize_distributed(activate("cpu"), 1, expert_parallel=2)
        assert parallel_state.get_expert_data_parallel_world_size() == 1
        return step_of(base, settings, stage, 2, ranks.rank(), 2)
    finally:
        leave_groups()
        initialize_distributed(activate("cpu"), 1)


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_experts_on_two_ranks_give_the_gradients_of_one_process(
    device, two_ranks, tiny_base, make_settings, tmp_path, stage
):
    settings = make_settings(tmp_path, "unused", optimizer="sgd", lr=0.0, min_lr=0.0, clip_grad=0.0).optim
    loss, kl, norm, grads = step_of(tiny_base, settings, stage, 1, 0, 1)
    found = two_ranks.run(step_on_ranks, tiny_base, settings, stage)
    experts = [{name for name in of_rank[3] if ".local_experts." in name} for of_rank in found]
    assert not experts[0] & experts[1] and len(experts[0]) == len(experts[1]) > 0
    assert set(found[0][3]) | set(found[1][3]) == set(grads)
    for other_loss, other_kl, other_norm, other_grads in found:
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert other_kl == pytest.approx(kl, rel=1e-5)
        assert other_norm == pytest.approx(norm, rel=1e-3)
        for name, grad in other_grads.items():
            scale = grads[name].abs().max().item()
            torch.testing.assert_close(grad, grads[name], atol=1e-5 * scale + 1e-9, rtol=1e-4, msg=name)
