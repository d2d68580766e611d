"""What is asked of a plan, and everything that can be refused from it and config.json alone. Light: no torch."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.errors import EXIT_OK, UserError
from megatron_patch.pruning.config_json import MTP_COUNT, read_config
from megatron_patch.pruning.families import family_of
from megatron_patch.pruning.feasibility import check_feasible, check_protected, feasible

CRITERIA = ("frequency", "gate_sum", "reap")


@dataclass(frozen=True)
class Wish:
    """What is asked for.

    Attributes:
        keep: experts of each layer to keep.
        criterion: of `criteria.CRITERIA`.
        source_weights: SOURCE=WEIGHT entries.
        protect: LAYER:ID,ID entries.
        groups: "keep" (the same number in each group) or "flatten" (n_group = topk_group = 1).
        mtp: "drop" the MTP layers, or prune them by their own "scores".
        target: "any" or "ascend".
        ep: expert parallel size of the target.
        routed_scaling_factor: what config.json shall have; None: as it is.
    """

    keep: int
    criterion: str = "frequency"
    source_weights: tuple[str, ...] = ()
    protect: tuple[str, ...] = ()
    groups: str = "keep"
    mtp: str = "drop"
    target: str = "any"
    ep: int | None = None
    routed_scaling_factor: float | None = None


def check(model: str | Path, wish: Wish) -> None:
    """Everything that can be refused from config.json alone.

    Raises:
        UserError: unknown family, infeasible number, protect list that does not fit, target without --ep.
    """
    config = read_config(Path(model))
    family = family_of(config)
    routing = family.routing(config)
    for flag, value, allowed in (
        ("--criterion", wish.criterion, CRITERIA),
        ("--mtp", wish.mtp, ("drop", "scores")),
        ("--target", wish.target, ("any", "ascend")),
    ):
        if value not in allowed:
            raise UserError(f"{flag} must be one of {', '.join(allowed)}: {value!r}; give one of them")
    if wish.target == "ascend" and wish.ep is None:
        raise UserError(
            "--target ascend must come with --ep, the number of NPUs that share the experts: it is missing; give e.g. --ep 32"
        )
    scale = wish.routed_scaling_factor
    if scale is not None and not 0 < scale < float("inf"):
        raise UserError(
            f"--routed-scaling-factor must be above 0: {scale}; give e.g. {config.get('routed_scaling_factor', 1.0)}"
        )
    check_feasible(routing, wish.keep, groups=wish.groups, ep=wish.ep)
    layers = family.moe_layers(config)
    if wish.mtp == "scores":
        layers += tuple(range(config["num_hidden_layers"], config["num_hidden_layers"] + (config.get(MTP_COUNT) or 0)))
    for layer, ids in parse_protected(wish.protect, layers).items():
        check_protected(routing, wish.keep, ids, layer, wish.groups)


def check_only(model: str | Path, wish: Wish) -> int:
    """`dsa-upcycle prune plan --check-only`: every feasible number, if the one asked for is feasible.

    Raises:
        UserError: see `check`.
    """
    check(model, wish)
    config = read_config(Path(model))
    routing = family_of(config).routing(config)
    numbers = feasible(routing, groups=wish.groups, ep=wish.ep)
    groups = f", {routing.n_group} groups of which {routing.topk_group}" if routing.n_group > 1 else ""
    print(f"feasible: {wish.keep} of {routing.experts} experts ({config['model_type']}, top {routing.top_k}{groups})")
    print(f"every feasible number: {_ranges(numbers)}")
    return EXIT_OK


def parse_protected(entries: Iterable[str], layers: Iterable[int]) -> dict[int, set[int]]:
    """`LAYER:ID[,ID...]`, where LAYER is a MoE layer's number or `all`, as ids by layer.

    Raises:
        UserError: an entry is of another form, or names a layer without experts.
    """
    layers = tuple(layers)
    result: dict[int, set[int]] = {}
    for entry in entries:
        layer, colon, ids = entry.partition(":")
        try:
            numbers = {int(part) for part in ids.split(",")}
            chosen = layers if layer == "all" else (int(layer),)
        except ValueError:
            colon = ""
        if not colon:
            raise UserError(f"--protect must be LAYER:ID,ID or all:ID: {entry!r}; e.g. --protect 3:17,40 all:5")
        if not set(chosen) <= set(layers):
            raise UserError(
                f"--protect must name MoE layers: layer {layer} is none; they are {layers[0]} to {layers[-1]}"
            )
        for number in chosen:
            result.setdefault(number, set()).update(numbers)
    return result


def parse_weights(entries: Iterable[str]) -> dict[str, float] | None:
    """`SOURCE=WEIGHT` entries of --source-weights; None without any. `Statistics.combined` checks names and values.

    Raises:
        UserError: an entry is of another form.
    """
    weights: dict[str, float] = {}
    for entry in entries:
        name, _, value = entry.rpartition("=")
        try:
            weights[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise UserError(f"--source-weights must be SOURCE=WEIGHT: {entry!r}; e.g. --source-weights code=2 chat=0.5")
    return weights or None


def _ranges(numbers: list[int]) -> str:
    """`6 to 256` for consecutive numbers, `16, 24 ... 256 (steps of 8)` for a regular list, else the numbers."""
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1:
        step = steps.pop()
        return f"{numbers[0]} to {numbers[-1]}" + (f" in steps of {step}" if step > 1 else "")
    return ", ".join(map(str, numbers))
