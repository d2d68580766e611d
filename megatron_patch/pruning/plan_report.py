"""What `prune plan` prints: coverage by layer, experts never routed to, bytes, devices."""

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from megatron_patch.pruning.checkpoint import read_config
from megatron_patch.pruning.families import family_of
from megatron_patch.pruning.feasibility import feasible

if TYPE_CHECKING:
    from megatron_patch.pruning.plan import Wish


def print_feasible(model: Path, wish: "Wish") -> None:
    """The answer of --check-only."""
    config = read_config(model)
    routing = family_of(config).routing(config)
    numbers = feasible(routing, groups=wish.groups, ep=wish.ep)
    groups = f", {routing.n_group} groups of which {routing.topk_group}" if routing.n_group > 1 else ""
    print(f"feasible: {wish.keep} of {routing.experts} experts ({config['model_type']}, top {routing.top_k}{groups})")
    print(f"every feasible number: {_ranges(numbers)}")


def print_plan(content: dict, path: Path, device_memory_gb: float | None) -> None:
    """A table of the layers, the sizes and the warnings."""
    table = Table(title=f"keep {content['keep']} experts of each layer by {content['criterion']}", title_justify="left")
    for column in ("layer", "kept traffic", "never routed", "of these kept", "hash: max load", "hash: repaired"):
        table.add_column(column, justify="right")
    for number, layer in content["layers"].items():
        unseen = set(layer["never_routed"])
        hashed = content["tid2eid"].get(number)
        load = f"{hashed['max_load']:.2f} x mean" if hashed else ""
        repaired = str(hashed["repaired_entries"]) if hashed else ""
        table.add_row(
            number, f"{layer['coverage']:.1%}", str(len(unseen)), str(len(unseen & set(layer["kept"]))), load, repaired
        )
    console = Console()
    console.print(table)
    shares = [layer["coverage"] for layer in content["layers"].values()]
    console.print(
        f"routed traffic kept: mean {sum(shares) / len(shares):.1%}, least {min(shares):.1%}", highlight=False
    )
    before, after = content["bytes"]["before"], content["bytes"]["after"]
    console.print(f"weights: {before / 1e9:.3f} GB -> {after / 1e9:.3f} GB ({after / before:.1%})", highlight=False)
    if device_memory_gb is not None:
        devices = [math.ceil(size / (device_memory_gb * 1e9)) for size in (before, after)]
        console.print(
            f"devices of {device_memory_gb:g} GB for the weights alone (no cache, no activations): {devices[0]} -> {devices[1]}",
            highlight=False,
        )
    for key, (old, new) in content["config_changes"].items():
        console.print(f"config.json: {key} {old} -> {new}", highlight=False)
    for warning in content["warnings"]:
        console.print(f"warning ({warning['code']}): {warning['text']}", style="yellow", highlight=False, markup=False)
    print(f"plan written to {path}")


def _ranges(numbers: list[int]) -> str:
    """`6 to 256` for consecutive numbers, `16, 24 ... 256 (steps of 8)` for a regular list, else the numbers."""
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1:
        step = steps.pop()
        return f"{numbers[0]} to {numbers[-1]}" + (f" in steps of {step}" if step > 1 else "")
    return ", ".join(map(str, numbers))
