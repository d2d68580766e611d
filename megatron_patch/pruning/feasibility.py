"""Which numbers of experts a router can work with. Checked before anything is computed or read.

transformers accepts some infeasible numbers without a word and routes wrongly, so the rules stand here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_patch.errors import UserError


@dataclass(frozen=True)
class Routing:
    """Sizes of a router.

    Attributes:
        experts: routed experts of a layer.
        top_k: experts that a token goes to.
        n_group: contiguous groups of experts; 1: none.
        topk_group: groups that a token may choose from.
        group_members: how many of its experts make a group's score; 0 without groups.
    """

    experts: int
    top_k: int
    n_group: int
    topk_group: int
    group_members: int


def broken_rules(routing: Routing, keep: int, *, groups: str = "keep", ep: int | None = None) -> list[str]:
    """The rules that `keep` experts of each layer would break, each with its values; empty: feasible.

    Args:
        groups: "keep": the same number in every group, n_group as it was; "flatten": n_group = topk_group = 1.
        ep: expert parallel size of the target, that must divide the number of experts.
    """
    broken = []
    if not 1 <= keep <= routing.experts:
        broken.append(f"1 <= experts kept <= {routing.experts}")
    if keep < routing.top_k:
        broken.append(f"experts kept >= top_k = {routing.top_k}, for a token goes to as many")
    n = routing.n_group
    if groups == "keep" and n > 1:
        if keep % n:
            broken.append(f"experts kept divisible by n_group = {n}, the same number in every group")
        elif keep // n < routing.group_members:
            broken.append(
                f"experts kept / n_group >= {routing.group_members}, for the best {routing.group_members} make a "
                f"group's score: {keep}/{n} = {keep // n}"
            )
        if keep % n == 0 and routing.topk_group * (keep // n) < routing.top_k:
            broken.append(
                f"topk_group * experts kept / n_group >= top_k = {routing.top_k}: "
                f"{routing.topk_group} * {keep}/{n} = {routing.topk_group * (keep // n)} experts are in reach"
            )
    if ep is not None and (ep < 1 or keep % ep):
        broken.append(f"experts kept divisible by --ep {ep}")
    return broken


def feasible(routing: Routing, *, groups: str = "keep", ep: int | None = None) -> list[int]:
    """Every feasible number of experts, ascending."""
    numbers = range(1, routing.experts + 1)
    return [n for n in numbers if not broken_rules(routing, n, groups=groups, ep=ep)]


def check_feasible(routing: Routing, keep: int, *, groups: str = "keep", ep: int | None = None) -> None:
    """Refuse a number of experts that the router cannot work with.

    Raises:
        UserError: every broken rule with its values, and the nearest feasible numbers.
    """
    if groups not in ("keep", "flatten"):
        raise UserError(f"--groups must be keep or flatten: {groups!r}; give one of them")
    broken = broken_rules(routing, keep, groups=groups, ep=ep)
    if not broken:
        return
    numbers = feasible(routing, groups=groups, ep=ep)
    remedy = f"nearest feasible: {_around(numbers, keep)}" if numbers else "no number is feasible with these settings"
    if groups == "keep" and routing.n_group > 1 and not broken_rules(routing, keep, groups="flatten", ep=ep):
        remedy += ", or --groups flatten"
    raise UserError(f"--keep must satisfy: {'; '.join(broken)}: --keep {keep} of {routing.experts}; {remedy}")


def check_protected(routing: Routing, keep: int, protected: Iterable[int], layer: int, groups: str) -> None:
    """Refuse a protect list that does not exist or does not fit into the number kept.

    Raises:
        UserError: an id out of range, or more protected experts than are kept in the layer or in a group.
    """
    ids = sorted(set(protected))
    outside = [i for i in ids if not 0 <= i < routing.experts]
    if outside:
        raise UserError(
            f"--protect must name experts 0 to {routing.experts - 1}: layer {layer} has no expert {outside[0]}; correct it"
        )
    n = routing.n_group if groups == "keep" else 1
    size, room = routing.experts // n, keep // n
    for group in range(n):
        inside = [i for i in ids if i // size == group]
        if len(inside) > room:
            where = f"group {group} of layer {layer}" if n > 1 else f"layer {layer}"
            raise UserError(
                f"--protect must fit into the experts kept: {len(inside)} are protected in {where}, {room} are kept; "
                "protect fewer or keep more"
            )


def _around(numbers: list[int], keep: int) -> str:
    """The feasible number below and the one above, the nearer first; of two equally near the larger, which loses less."""
    below = [n for n in numbers if n < keep][-1:]
    above = [n for n in numbers if n > keep][:1]
    return " or ".join(str(n) for n in sorted(above + below, key=lambda n: abs(n - keep)))
