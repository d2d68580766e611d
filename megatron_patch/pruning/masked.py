"""A dry run: a loaded model routes as though only the kept experts were there, and nothing is written.

The dropped experts are masked, not removed, so this is also an independent oracle of a pruned checkpoint: it shares no
code with the one that writes it, and group-limited routing keeps its groups. A mask is -inf: 0 would win over negative
biases.

Shape letters: T tokens, E experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_patch.errors import UserError
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.hooks import moe_blocks, replaced_forward
from megatron_patch.pruning.plan_file import Plan, planned_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BIAS, TABLE = "e_score_correction_bias", "tid2eid"
# Key of config.json -> what transformers' routers call it.
ROUTER_ATTRIBUTES = {
    "n_group": "num_group",
    "topk_group": "topk_group",
    "routed_scaling_factor": "routed_scaling_factor",
}


@contextmanager
def masked(
    model: "PreTrainedModel", kept: Mapping[int, Sequence[int]], tid2eid: Mapping[int, Tensor] | None = None
) -> Iterator[None]:
    """Within the block, the routers choose among the kept experts only.

    Softmax routers get logits of -inf before the softmax, so that the denominator shrinks as it does in a pruned model.
    Sigmoid routers get a choice of -inf and weigh the chosen as before. A hash router gets another table.

    Args:
        kept: layer -> old ids of its kept experts; layers that are not named stay whole.
        tid2eid: hash-routed layer -> int64 [vocabulary, K] table in *old* ids.

    Raises:
        UserError: no such layer or expert, an id twice, too few to choose from, or a hash layer whose table names a
            dropped expert.
    """
    blocks = moe_blocks(model)
    with ExitStack() as stack:
        for layer, experts in kept.items():
            if layer not in blocks:
                raise UserError(f"kept experts are of MoE layers: layer {layer} is none; there are {', '.join(map(str, blocks))}")
            gate = blocks[layer].gate
            drop_E = _dropped(gate, layer, experts)
            if hasattr(gate, TABLE):
                table = (tid2eid or {}).get(layer, getattr(gate, TABLE))
                stack.enter_context(_attribute(gate, TABLE, _checked_table(table, gate, drop_E, layer)))
            elif hasattr(gate, BIAS):
                bias = getattr(gate, BIAS)
                stack.enter_context(_attribute(gate, BIAS, bias.masked_fill(drop_E.to(bias.device), -torch.inf)))
            elif hasattr(gate, "topk_method"):
                stack.enter_context(replaced_forward(gate, partial(route_softmax, gate, drop_E=drop_E)))
            else:
                raise UserError(f"a router must be of a known kind: layer {layer} has {type(gate).__name__}")
        yield


@contextmanager
def reconfigured(model: "PreTrainedModel", config_changes: Mapping[str, tuple]) -> Iterator[None]:
    """Within the block, the routers follow a plan's changes of config.json: groups, and the scale of routed weights.

    Args:
        config_changes: key -> (old, new); keys that no router reads are passed over.
    """
    new = {ROUTER_ATTRIBUTES[key]: value for key, (_, value) in config_changes.items() if key in ROUTER_ATTRIBUTES}
    with ExitStack() as stack:
        for block in moe_blocks(model).values():
            for name, value in new.items():
                stack.enter_context(_attribute(block.gate, name, value))
        yield


@contextmanager
def as_planned(model: "PreTrainedModel", checkpoint: MoeCheckpoint, plan: Plan) -> Iterator[None]:
    """Within the block, the model computes what the checkpoint that `prune apply` makes of the plan would.

    Args:
        model: what transformers loads of `checkpoint`; it has no MTP layers.
        plan: a plan for `checkpoint`.

    Raises:
        UserError: a hash layer's table does not come out as the plan says; see also `masked`.
    """
    kept = {number: experts for number, experts in plan.kept.items() if not checkpoint.layers[number].mtp}
    tables = {
        number: torch.tensor(kept[number])[planned_table(checkpoint, plan, number).long()]
        for number in plan.tid2eid
        if number in kept
    }
    # The groups first: without them, `masked` counts other experts in reach.
    with reconfigured(model, plan.config_changes), masked(model, kept, tables):
        yield


def route_softmax(gate: nn.Module, hidden: Tensor, drop_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`DeepseekV2TopkRouter.forward` with logits of -inf for dropped experts.

    Args:
        gate: the router.
        hidden: [..., hidden size].
        drop_E: bool [E].

    Returns:
        logits fp32 [T, E], weights fp32 [T, K], experts int64 [T, K].
    """
    x = hidden.reshape(-1, gate.hidden_dim).float()
    logits_TE = F.linear(x, gate.weight.float()).masked_fill(drop_E.to(x.device), -torch.inf)
    scores_TE = logits_TE.softmax(-1, dtype=torch.float32)
    choice_TE = scores_TE
    if gate.topk_method == "group_limited_greedy":
        grouped = scores_TE.view(len(x), gate.num_group, -1)
        best = grouped.amax(-1).topk(gate.topk_group, dim=-1, sorted=False).indices
        allowed = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=x.device).scatter_(1, best, True)
        choice_TE = grouped.masked_fill(~allowed[..., None], 0.0).flatten(1)
    # transformers scores an expert that is not allowed 0; a dropped one must lose against those too.
    choice_TE = choice_TE.masked_fill(drop_E.to(x.device), -1.0)
    weight, index = choice_TE.topk(gate.top_k, dim=-1, sorted=False)
    return logits_TE, weight * gate.routed_scaling_factor, index


def _dropped(gate: nn.Module, layer: int, experts: Sequence[int]) -> Tensor:
    """bool [E], if the router can do with the rest."""
    number = gate.num_experts
    drop_E = torch.ones(number, dtype=torch.bool)
    for expert in experts:
        if not 0 <= expert < number:
            raise UserError(f"kept experts must be from 0 to {number - 1}: layer {layer} keeps {expert}; mend the plan")
        if not drop_E[expert]:
            raise UserError(f"a kept expert stands once: layer {layer} keeps {expert} twice; mend the plan")
        drop_E[expert] = False
    groups, limit = getattr(gate, "num_group", None) or 1, getattr(gate, "topk_group", None) or 1
    if getattr(gate, "topk_method", "") == "greedy":
        groups = limit = 1
    reachable = int((~drop_E).view(groups, -1).sum(1).sort().values[:limit].sum())
    if reachable < gate.top_k:
        raise UserError(
            f"a token must reach top-k = {gate.top_k} kept experts: in layer {layer} it may reach {reachable} only; keep more"
        )
    return drop_E


def _checked_table(table: Tensor, gate: nn.Module, drop_E: Tensor, layer: int) -> Tensor:
    own = getattr(gate, TABLE)
    if table.shape != own.shape or not bool(((table >= 0) & (table < gate.num_experts)).all()):
        raise UserError(f"{TABLE} must be {tuple(own.shape)} of expert ids: that of layer {layer} is not; mend the plan")
    if bool(drop_E[table.cpu().long()].any()):
        raise UserError(
            f"a hash layer's {TABLE} must name kept experts: that of layer {layer} names dropped ones; give the plan's table"
        )
    return table.to(own)


@contextmanager
def _attribute(module: nn.Module, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)

