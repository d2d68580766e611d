"""What a run needs, beside the weights, to go on as if it had never stopped."""

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_patch.training.optimizer import inner_optimizers


def training_state(optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler) -> dict:
    """Optimizer, fp32 main parameters, schedule and RNG, as tensors, numbers and containers."""
    inner = inner_optimizers(optimizer)
    return {
        "optimizers": [each.state_dict() for each in inner],
        # With bf16 the optimizer steps fp32 copies: the rounded weights alone would not resume bit for bit.
        "main_parameters": [[p.detach().clone() for p in _parameters(each)] for each in inner],
        "scheduler": scheduler.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()},
    }


@torch.no_grad()
def restore_training_state(state: dict, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler) -> None:
    """The inverse of `training_state`, on the same layout, after the model's weights were loaded."""
    optimizer.reload_model_params()
    for each, saved, main in zip(
        inner_optimizers(optimizer), state["optimizers"], state["main_parameters"], strict=True
    ):
        each.load_state_dict(saved)
        for parameter, value in zip(_parameters(each), main, strict=True):
            parameter.copy_(value)
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"]["torch"])
    get_cuda_rng_tracker().set_states(state["rng"]["tracker"])


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
