"""DDP, optimizer and learning-rate schedule of megatron-core for a model of which a small part trains."""

import contextlib

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, _get_param_groups, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from megatron_patch.config import MUON, OptimizerSettings
from megatron_patch.io.finite import all_finite

_INDEXER = ParamKey(name="*.indexer.*")
_VECTOR = ParamKey(
    with_name_predicate=ParamWithNamePredicate(name="vector", fn=lambda parameter, name: parameter.dim() == 1)
)


def wrap_ddp(
    model: nn.Module, use_distributed_optimizer: bool, *, overlap_grad_reduce: bool = False
) -> DistributedDataParallel:
    """Gradients in fp32 buffers, for trainable parameters only (so freeze first).

    Args:
        overlap_grad_reduce: sum them bucket by bucket during the last backward pass; megatron-core's schedule is told which
            is the last through the model's config.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=use_distributed_optimizer,
        overlap_grad_reduce=overlap_grad_reduce,
        # A non-finite gradient is this code's to handle: it skips the step and counts.
        check_for_nan_in_grad=False,
    )
    ddp = DistributedDataParallel(model.config, config, model)
    if overlap_grad_reduce:  # else every micro-batch would sum what the ones before it have left in the buffers
        model.config.no_sync_func = ddp.no_sync
    return ddp


def build_optimizer(
    model: DistributedDataParallel, settings: OptimizerSettings, *, bf16: bool, use_distributed_optimizer: bool
) -> MegatronOptimizer:
    """AdamW, SGD or Muon over the trainable parameters; vectors without weight decay; the indexers' own rate if asked."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = OptimizerConfig(
        optimizer="adam" if settings.optimizer == MUON else settings.optimizer,
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
        sgd_momentum=0.9,
        clip_grad=settings.clip_grad,
        bf16=bf16,
        params_dtype=dtype,
        use_distributed_optimizer=use_distributed_optimizer,
    )
    overrides = {_VECTOR: {"wd_mult": 0.0}}
    if settings.indexer_lr is not None:
        share = settings.indexer_lr / settings.lr if settings.lr else 1.0
        overrides[_INDEXER] = {"max_lr": settings.indexer_lr, "min_lr": settings.min_lr * share}
    build = _muon_and_adam if settings.optimizer == MUON else get_megatron_optimizer
    optimizer = build(config, [model], config_overrides=overrides)
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _muon_and_adam(
    config: OptimizerConfig, model_chunks: list[DistributedDataParallel], config_overrides: dict
) -> MegatronOptimizer:
    """PyTorch's Muon (Jordan et al. 2024; update RMS as AdamW's, arXiv 2502.16982) for matrices, AdamW for the rest.

    megatron-core's own Muon needs a CUDA-only package. Routers and the indexers stay with AdamW: their matrices are
    judged row by row, and an orthogonalised update would give every index head the same say.
    """
    [model] = model_chunks
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = {
        name: p
        for name, p in trainable.items()
        if p.dim() == 2 and not name.endswith("router.weight") and ".indexer." not in name
    }
    groups = _groups_of(model, matrices, trainable, config, config_overrides)
    muon = torch.optim.Muon(groups, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
    if config.bf16:
        wrapped: MegatronOptimizer = Float16OptimizerWithFloat16Params(muon, config, None, _no_initial_state)
    else:
        wrapped = FP32Optimizer(muon, config, _no_initial_state)
    rest = {name: p for name, p in trainable.items() if name not in matrices}
    with _only_trainable(rest, trainable):
        adam = get_megatron_optimizer(config, model_chunks, config_overrides=config_overrides)
    return ChainedOptimizer([wrapped, *adam.chained_optimizers])


def _groups_of(model, chosen: dict, trainable: dict, config: OptimizerConfig, overrides: dict) -> list[dict]:
    """megatron-core's parameter groups (rates, weight decay) of the chosen parameters alone."""
    with _only_trainable(chosen, trainable):
        return [group for group in _get_param_groups([model], config, overrides) if group["params"]]


@contextlib.contextmanager
def _only_trainable(chosen: dict, trainable: dict):
    """megatron-core takes the parameters that require a gradient; show it some of them, as its own Muon does."""
    for name, parameter in trainable.items():
        parameter.requires_grad_(name in chosen)
    try:
        yield
    finally:
        for parameter in trainable.values():
            parameter.requires_grad_(True)


def _no_initial_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """megatron-core asks for a state before it loads one; ours is restored by the torch optimizer itself."""


def build_scheduler(
    optimizer: MegatronOptimizer, settings: OptimizerSettings, train_iters: int
) -> OptimizerParamScheduler:
    """Warm-up and decay, counted in optimizer steps."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=train_iters,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside: one, or one each for dense and for expert parameters."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each.optimizer for each in chained if not getattr(each, "is_stub_optimizer", False) and each.optimizer]


def gradients_are_finite(model: DistributedDataParallel) -> bool:
    """Whether every reduced gradient of every rank is finite; asked before the step, which would spread a NaN."""
    buffers = [*model.buffers, *model.expert_parallel_buffers]
    bad = torch.tensor(
        [not all(all_finite(buffer.grad_data) for buffer in buffers)], dtype=torch.float32, device=buffers[0].grad_data.device
    )
    dist.all_reduce(bad)
    return bad.item() == 0
