"""What a run needs, beside the weights, to go on as if it had never stopped: optimizer, schedule, random numbers.

The optimizer's state is taken parameter by parameter, under global names (`checkpoint.optimizer_state`), and so fits any
layout. Rates, betas and decay come from the settings and the schedule.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor, nn

from megatron_patch.checkpoint.manifest import Layout
from megatron_patch.checkpoint.optimizer_state import MAIN, OptimizerState, entry_name
from megatron_patch.devices import ranks
from megatron_patch.errors import UserError
from megatron_patch.model.names import trainable

STEP = "step"
# What optimizers keep of a parameter once they have stepped, by class; without a part of it they would start that anew.
_KEPT = {"AdamW": {"exp_avg", "exp_avg_sq", "step"}, "SGD": {"momentum_buffer"}, "Muon": {"momentum_buffer"}}


@dataclass(frozen=True)
class Piece:
    """Entries `begin` to `end` of a flattened parameter, and the optimizer's own tensor of them.

    `own` is the parameter itself, a view into it, or an fp32 copy (`copied`). `written`: this rank is the one that writes.
    """

    name: str
    begin: int
    end: int
    own: Tensor
    copied: bool
    written: bool
    optimizer: torch.optim.Optimizer
    group: dict

    @property
    def steps_of_group(self) -> bool:
        """Whether steps are counted for a parameter group, as by MindSpeed's and Transformer Engine's AdamW, and not for each
        parameter, as by PyTorch's optimizers and what is derived from them."""
        kinds = [kind for kind in type(self.optimizer).__mro__ if kind is not torch.optim.Optimizer]
        return not any(kind.__module__.startswith("torch.optim.") for kind in kinds)


def pieces_of(model: nn.Module, optimizer: MegatronOptimizer, experts: range | None) -> list[Piece]:
    """Every piece that this rank's optimizers step.

    Args:
        model: bare.
        experts: global numbers of the experts that this rank holds; None: all.
    """
    names = {id(parameter): name for name, parameter in trainable(model, experts).items()}
    found = []
    for wrapper in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(wrapper, "is_stub_optimizer", False) or wrapper.optimizer is None:
            continue
        sharded, here = isinstance(wrapper, DistributedOptimizer), []
        groups = {id(own): group for group in wrapper.optimizer.param_groups for own in group["params"]}
        for parameter, own, begin, end in _shards(wrapper) if sharded else _wholes(wrapper, model):
            copied = own.dtype != parameter.dtype
            written = sharded or _first_holder(parameter)
            here.append(Piece(names[id(parameter)], begin, end, own, copied, written, wrapper.optimizer, groups[id(own)]))
        assert len(here) == sum(len(group["params"]) for group in wrapper.optimizer.param_groups)
        found += here
    return found


def _shards(wrapper: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, Tensor, int, int]]:
    """A distributed optimizer steps flat parts of parameters."""
    groups = [*zip(wrapper.model_float16_groups, wrapper.shard_fp32_from_float16_groups, strict=True)]
    groups += zip(wrapper.model_fp32_groups, wrapper.shard_fp32_groups, strict=True)
    for parameters, shards in groups:
        for parameter, shard in zip(parameters, shards, strict=True):
            part = wrapper._get_model_param_range_map(parameter)["param"]
            yield parameter, shard, part.start, part.end


def _wholes(wrapper: MegatronOptimizer, model: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor, int, int]]:
    """Others step parameters, or their fp32 copies."""
    parameter_of = {id(getattr(p, "main_param", p)): p for p in model.parameters() if p.requires_grad}
    for group in wrapper.optimizer.param_groups:
        for own in group["params"]:
            yield parameter_of[id(own)], own, 0, own.numel()


def _first_holder(parameter: nn.Parameter) -> bool:
    """Whether this is the first of the ranks that hold a parameter, and the whole state of it."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_rank() == 0
    return parallel_state.get_expert_data_parallel_rank() == 0


def optimizer_tensors(pieces: list[Piece]) -> dict[str, Tensor]:
    """What this rank writes of the optimizer's state, by entry; a parameter that was never stepped has none."""
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        if not piece.written:
            continue
        if piece.copied:  # the rounded weights alone would not resume bit for bit
            tensors[entry_name(MAIN, piece.name, piece.begin)] = piece.own.detach().flatten()
        state = piece.optimizer.state.get(piece.own, {})
        if state and piece.steps_of_group and STEP in piece.group:  # in PyTorch's form: a run goes on with either kind
            state = {**state, STEP: torch.tensor(float(piece.group[STEP]))}
        for key, value in state.items():
            if value is None:  # SGD without momentum
                continue
            if value.dim() == 0:
                if piece.begin == 0:
                    tensors[entry_name(key, piece.name, 0)] = value
            else:
                tensors[entry_name(key, piece.name, piece.begin)] = value.detach().flatten()
    return tensors


@torch.no_grad()
def restore_optimizer(pieces: list[Piece], state: OptimizerState, checkpoint: Path, stepped: bool) -> None:
    """Give the pieces their state, however it was cut when it was saved. No tensor is shared between parameters.

    Args:
        checkpoint: whose state it is.
        stepped: whether the optimizer had made a step; before its first one it keeps nothing.

    Raises:
        UserError: the state of one is missing, not whole, or another kind of optimizer's.
    """
    for piece in pieces:
        keys = state.keys(piece.name)
        if stepped or state.parameters:
            _check_keys(piece, keys, checkpoint, stepped)
        own: dict[str, Tensor] = {}
        for key in keys:
            value = state.read(key, piece.name, piece.begin, piece.end)
            if value.dim():
                value = value.view_as(piece.own).to(piece.own.device)
            if key == MAIN:
                piece.own.copy_(value)
            elif key == STEP and piece.steps_of_group:
                piece.group[STEP] = int(value)
            else:
                own[key] = value
        if own:
            piece.optimizer.state[piece.own] = own


def _check_keys(piece: Piece, keys: list[str], checkpoint: Path, stepped: bool) -> None:
    """Refuse a piece whose optimizer would go on with less than it had."""
    name = type(piece.optimizer).__name__
    kept = _KEPT.get(name) if stepped else set()
    if name == "SGD" and not piece.optimizer.defaults["momentum"]:
        kept = set()
    found = set(keys) - {MAIN}
    if piece.copied == (MAIN in keys) and (found == kept if kept is not None else found):
        return
    wanted = [*(["its state"] if kept is None else sorted(kept)), *[MAIN] * piece.copied]
    raise UserError(
        f"an optimizer's state covers what trains: {checkpoint} has {', '.join(keys) or 'nothing'} of {piece.name}, {name} needs "
        f"{', '.join(wanted) or 'nothing'}; use another iteration, or start from its weights with --pretrained-checkpoint"
    )


def common_state(scheduler: OptimizerParamScheduler) -> dict:
    """Schedule, and every rank's generators, as tensors, numbers and containers. All ranks call it."""
    return {
        "scheduler": scheduler.state_dict(),
        "rng": ranks.gather({"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}),
    }


def restore_common(state: dict, scheduler: OptimizerParamScheduler, saved: Layout, layout: Layout) -> None:
    """The inverse. A run on other ranks takes rank 0's generator, and keeps megatron-core's, which depend on the rank.

    Nothing in a step draws a random number.

    Raises:
        UserError: a checkpoint of a release before the optimizer's state had names.
    """
    if "optimizers" in state:
        raise UserError(
            "a checkpoint of an earlier form holds its optimizer's state without names: this one does; start from its weights "
            "with --pretrained-checkpoint"
        )
    scheduler.load_state_dict(state["scheduler"])
    same = (saved.data_parallel, saved.expert_parallel) == (layout.data_parallel, layout.expert_parallel)
    own = state["rng"][ranks.rank() if same else 0]
    torch.set_rng_state(own["torch"])
    if same:
        get_cuda_rng_tracker().set_states(own["tracker"])
