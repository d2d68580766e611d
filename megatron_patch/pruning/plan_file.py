"""plan.json: which experts stay, read back and checked against the checkpoint that it is for."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_patch.errors import UserError
from megatron_patch.io.strict_json import read_json
from megatron_patch.pruning import tid2eid
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.config_json import MTP_COUNT

SCHEMA = 1
DRY_RUN_KEY = "dry_run"
ABSENT = None  # what `config_changes` has as the old value of a key that config.json lacks
CHANGEABLE = ("n_routed_experts", MTP_COUNT, "n_group", "topk_group", "routed_scaling_factor")


@dataclass(frozen=True)
class Plan:
    """A checked plan.

    Attributes:
        keep: experts of each layer after pruning.
        kept: of each MoE layer's number, the experts that stay, ascending.
        drop_mtp: MTP layers go.
        groups: "keep" or "flatten".
        config_changes: key of config.json -> (old, new).
        tid2eid: of each hash layer's number, what plan.json says of its table.
        content: plan.json itself.
    """

    keep: int
    kept: dict[int, list[int]]
    drop_mtp: bool
    groups: str
    config_changes: dict[str, tuple]
    tid2eid: dict[int, dict]
    content: dict


def plan_of(content: dict) -> Plan:
    """The plan that plan.json's content describes, taken apart; nothing is checked against a checkpoint.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is malformed.
    """
    return Plan(
        keep=int(content["keep"]),
        kept={int(number): [int(e) for e in layer["kept"]] for number, layer in content["layers"].items()},
        drop_mtp=content["mtp"] == "drop",
        groups=content["groups"],
        config_changes={key: (old, new) for key, (old, new) in content["config_changes"].items()},
        tid2eid={int(number): dict(entry) for number, entry in content["tid2eid"].items()},
        content=content,
    )


def same_plan(content: object, other: object) -> bool:
    """Whether two plan.json say the same; a dry run is a finding about a plan, no part of it."""
    return isinstance(content, dict) and isinstance(other, dict) and _planned(content) == _planned(other)


def _planned(content: dict) -> dict:
    return {key: value for key, value in content.items() if key != DRY_RUN_KEY}


def read_plan(path: str | Path, checkpoint: MoeCheckpoint) -> Plan:
    """Read plan.json and check that it is a plan for this checkpoint.

    Raises:
        UserError: the file is missing or malformed, is for another model, or contradicts itself or the checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"--plan must be a file of `prune plan`: {path} does not exist; make it first")
    try:
        content = read_json(path)
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']!r}, this release reads {SCHEMA}")
        renumbering = {
            int(n): {int(o): new for o, new in v["old_to_new"].items()} for n, v in content["layers"].items()
        }
        plan = plan_of(content)
        model_type, sha256 = content["model_type"], content["source_index_sha256"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--plan must be a file of `prune plan`: {path}: {error!r}; make it again") from None
    if (model_type, sha256) != (checkpoint.family.model_type, checkpoint.sha256):
        raise UserError(
            f"--plan must be for this model: {path} is for a {model_type} with index {str(sha256)[:12]}, {checkpoint.path} is a "
            f"{checkpoint.family.model_type} with {checkpoint.sha256[:12]}; plan again, or give the model it was made for"
        )
    for number, experts in plan.kept.items():
        if renumbering[number] != {old: new for new, old in enumerate(experts)}:
            raise UserError(
                f"a plan must renumber in order: layer {number} of {path} does not map kept to 0, 1, 2 ...; make it again"
            )
    _check(plan, path, checkpoint)
    return plan


def planned_table(checkpoint: MoeCheckpoint, plan: Plan, number: int) -> Tensor:
    """The table of hash layer `number` after pruning: [vocabulary, top_k] of new expert numbers.

    Raises:
        UserError: it does not come out as the plan says.
    """
    layer, entry = checkpoint.layers[number], plan.tid2eid[number]
    load = torch.tensor(entry["load"], dtype=torch.float64)
    if len(load) != checkpoint.routing.experts:
        raise UserError(f"a plan must give the load of every expert: layer {number} has {len(load)}; make it again")
    result = tid2eid.rewrite(checkpoint.load(layer.table), checkpoint.load(layer.router), plan.kept[number], load)
    if tid2eid.table_sha256(result.table) != entry["sha256"]:
        raise UserError(
            f"{layer.table} must come out as the plan says: its hash differs; make the plan again on this machine"
        )
    return result.table


def _check(plan: Plan, path: Path, checkpoint: MoeCheckpoint) -> None:
    def refuse(detail: str) -> UserError:
        return UserError(f"a plan must fit its checkpoint: {path}: {detail}; make it again with `prune plan`")

    expected = {number for number, layer in checkpoint.layers.items() if not (layer.mtp and plan.drop_mtp)}
    if plan.kept.keys() != expected:
        raise refuse(f"it lists other layers, e.g. {min(plan.kept.keys() ^ expected)}")
    for number, experts in plan.kept.items():
        if (
            len(experts) != plan.keep
            or experts != sorted(set(experts))
            or not set(experts) <= set(range(checkpoint.routing.experts))
        ):
            raise refuse(
                f"layer {number} must keep {plan.keep} experts of 0 to {checkpoint.routing.experts - 1}, ascending"
            )
    for key, (old, _) in plan.config_changes.items():
        if key not in CHANGEABLE or checkpoint.config.get(key, ABSENT) != old:
            raise refuse(f"config.json has {key} = {checkpoint.config.get(key)!r}, the plan changes it from {old!r}")
    now = {**checkpoint.config, **{key: new for key, (_, new) in plan.config_changes.items()}}
    if now["n_routed_experts"] != plan.keep:
        raise refuse(f"it keeps {plan.keep} experts and writes n_routed_experts = {now['n_routed_experts']}")
    hashed = {n for n in plan.kept if checkpoint.layers[n].table and plan.keep < checkpoint.routing.experts}
    if plan.tid2eid.keys() != hashed:
        raise refuse("its tid2eid lists other layers than those with a table")
