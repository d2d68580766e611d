"""`dsa-upcycle plan`: the counts and bytes as tables, and as layout.json."""

import json
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_patch.errors import UserError
from megatron_patch.layout_rules import check_layout
from megatron_patch.model.architecture import Architecture, DsaSettings, read_architecture
from megatron_patch.model.layer_pattern import appended_pattern, check_pattern, format_pattern, parse_layer_pattern
from megatron_patch.planning.layout import Bytes, Layout, PlanParallel, Work, bytes_per_device, make_layout
from megatron_patch.planning.parameters import Count, count, parts

SCHEMA = 1
_CROWDED = 0.9  # of a device's memory: above it, communication buffers and fragmentation decide


def run(
    base: Path,
    *,
    dsa_layers: int = 2,
    layer_pattern: str | None = None,
    dsa: DsaSettings | None = None,
    parallel: PlanParallel | None = None,
    devices: int = 1,
    device_memory_gb: float | None = None,
    seq_length: int = 4096,
    micro_batch_size: int = 1,
    bf16: bool = True,
    json_file: Path | None = None,
) -> int:
    """Print the plan of an upcycling run, and write it to `json_file` if given.

    Args:
        base: a Hugging Face directory or a config.json; weights are not needed.
        dsa_layers: DSA layers on top, unless `layer_pattern` says it all.
        dsa: sizes of the indexer.
        parallel: sizes of the parallel groups.
        devices: in all.
        device_memory_gb: of one device, 1e9 bytes; None: nothing is said about fitting.
        seq_length, micro_batch_size: what a rank takes through the model at once.
        bf16: width of weights and activations; off: fp32.
        json_file: layout.json.

    Returns:
        Exit code 0, also where the plan does not fit: that is an answer.

    Raises:
        UserError: the base, the pattern or the layout breaks a rule.
    """
    for name, value in (("--seq-length", seq_length), ("--micro-batch-size", micro_batch_size)):
        if value < 1:
            raise UserError(f"{name} must be positive: {value}; give 1 or more")
    if device_memory_gb is not None and not 0 < device_memory_gb < float("inf"):
        raise UserError(f"--device-memory-gb must be positive: {device_memory_gb}; give the device's memory, e.g. 64")
    arch = read_architecture(base)
    dsa, parallel = dsa or DsaSettings(), parallel or PlanParallel()
    pattern = parse_layer_pattern(layer_pattern) if layer_pattern else appended_pattern(arch.num_layers, dsa_layers)
    check_pattern(pattern, arch.num_layers)
    layout = make_layout(parallel, devices, arch, len(pattern))
    work = Work(seq_length, micro_batch_size, 2 if bf16 else 4)
    found = parts(arch, pattern, dsa)
    by_name, model = count(found)
    used = bytes_per_device(found, arch, pattern, dsa, layout, work)
    warnings = _warnings(parallel, layout, pattern, arch, used, device_memory_gb)
    fits = None if device_memory_gb is None else used.total <= device_memory_gb * 1e9
    _print(Console(), pattern, by_name, model, layout, used, work, device_memory_gb, fits, warnings)
    if json_file is not None:
        json_file.write_text(json.dumps(_document(model, layout, used, fits, warnings), indent=2) + "\n")
    return 0


def _warnings(
    parallel: PlanParallel,
    layout: Layout,
    pattern: tuple[str, ...],
    arch: Architecture,
    used: Bytes,
    device_memory_gb: float | None,
) -> list[dict[str, str]]:
    found = []
    try:
        check_layout(parallel.launch(ranks=layout.dp * layout.tp * layout.pp * layout.cp, experts=arch.num_experts))
    except UserError as refusal:
        found.append({"code": "not_in_this_release", "text": f"the training scripts refuse this layout: {refusal}"})
    if len(pattern) % layout.pp:
        text = f"{len(pattern)} layers over {layout.pp} stages: the first stages take one more"
        found.append({"code": "uneven_stages", "text": text})
    if layout.pp > 1 and len(pattern) - len(pattern) // layout.pp <= arch.num_layers:
        text = "only the last stage trains: the others are done when their forward is"
        found.append({"code": "frozen_stages", "text": text})
    if device_memory_gb is not None and _CROWDED * device_memory_gb * 1e9 < used.total <= device_memory_gb * 1e9:
        text = "more than 90% of the device: communication buffers and fragmentation are not counted"
        found.append({"code": "crowded", "text": text})
    return found


def _document(model: Count, layout: Layout, used: Bytes, fits: bool | None, warnings: list[dict[str, str]]) -> dict:
    return {
        "schema": SCHEMA,
        "parameters": {"base": model.base, "trainable": model.trainable, "total": model.total, "active": model.active},
        "layout": {key: getattr(layout, key) for key in ("tp", "pp", "ep", "etp", "cp", "dp")},
        "bytes_per_device": {**asdict(used), "total": used.total},
        "fits": fits,
        "warnings": warnings,
    }


def _print(
    console: Console,
    pattern: tuple[str, ...],
    by_name: dict[str, Count],
    model: Count,
    layout: Layout,
    used: Bytes,
    work: Work,
    device_memory_gb: float | None,
    fits: bool | None,
    warnings: list[dict[str, str]],
) -> None:
    table = Table(title=f"Parameters of {format_pattern(pattern)}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("part", "frozen", "trainable", "total", "per token"):
        table.add_column(column, justify="left" if column == "part" else "right", no_wrap=True)
    for name, each in by_name.items():
        table.add_row(name, *(f"{n:,}" for n in (each.base, each.trainable, each.total, each.active)))
    table.add_section()
    table.add_row("all", *(f"{n:,}" for n in (model.base, model.trainable, model.total, model.active)))
    console.print(table)

    groups = " ".join(f"{key}{getattr(layout, key)}" for key in ("tp", "pp", "ep", "etp", "cp", "dp"))
    width = "bf16" if work.width == 2 else "fp32"
    console.print(f"On the fullest device, in GB of 1e9 bytes: {groups}, {work.tokens} tokens at a time, {width}")
    memory = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    memory.add_column("part")
    memory.add_column("GB", justify="right")
    notes = {
        "frozen": "frozen weights",
        "trainable": "trainable weights and fp32 gradients",
        "optimizer": "Adam" + (", spread over the data-parallel ranks" if layout.distributed_optimizer else ""),
        "activations": "activations (estimate)",
        "logits": "logits, fp32 copy, gradient",
    }
    for key, note in notes.items():
        memory.add_row(note, f"{getattr(used, key) / 1e9:,.2f}")
    memory.add_section()
    memory.add_row("all", f"{used.total / 1e9:,.2f}")
    console.print(memory)
    if fits is not None:
        console.print(f"{'fits' if fits else 'does NOT fit'} a device of {device_memory_gb:g} GB")
    for warning in warnings:
        console.print(f"note ({warning['code']}): {warning['text']}", highlight=False)
