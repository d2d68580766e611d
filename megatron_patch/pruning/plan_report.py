"""What `prune plan` prints: coverage by layer, experts never routed to, bytes, devices."""

import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_patch.pruning.plan_file import DRY_RUN_KEY


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
    if DRY_RUN_KEY in content:
        _print_dry_run(console, content[DRY_RUN_KEY])
    for warning in content["warnings"]:
        console.print(
            f"warning ({warning['code']}): {warning['text']}",
            style="yellow",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    print(f"plan written to {path}")


def _print_dry_run(console: Console, entry: dict) -> None:
    losses, perplexities = (" -> ".join(f"{value:.4f}" for value in entry[key]) for key in ("loss", "perplexity"))
    console.print(
        f"dry run over {entry['file']} ({entry['rows']} rows, {entry['tokens']:,} tokens, {entry['dtype']}), whole -> masked: loss "
        f"{losses} nats per token, perplexity {perplexities}; KL(whole || masked) {entry['kl']:.4f} nats per token",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
