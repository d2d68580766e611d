"""`dsa-upcycle plan`: the counts, bytes and costs as tables, and as layout.json."""

import json
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_patch.errors import UserError
from megatron_patch.layout_rules import check_layout
from megatron_patch.model.architecture import Architecture, DsaSettings, read_architecture, read_config
from megatron_patch.model.layer_pattern import appended_pattern, check_pattern, format_pattern, parse_layer_pattern
from megatron_patch.planning.cost import Cost, Speeds, step_cost
from megatron_patch.planning.deepseek_v32 import is_deepseek_v32, read_deepseek_v32, whole_parts
from megatron_patch.planning.layout import Bytes, Layout, PlanParallel, Work, bytes_per_device, make_layout
from megatron_patch.planning.parameters import Count, Part, count, parts
from megatron_patch.planning.recommend import Recommendation, batch_divides, recommend

SCHEMA = 1
_MIN_WIDTH = 100  # narrower, the table would cut the counts
_CROWDED = 0.9  # of a device's memory: above it, communication buffers and fragmentation decide


@dataclass(frozen=True)
class Plan:
    """Everything that is printed and written."""

    pattern: tuple[str, ...]
    by_name: dict[str, Count]
    model: Count
    layout: Layout
    used: Bytes
    work: Work
    cost: Cost
    global_batch_size: int
    micro_batches: int
    device_memory_gb: float | None
    recommended: Recommendation | None
    batch_divides: bool
    warnings: list[dict[str, str]]

    @property
    def fits(self) -> bool | None:
        return None if self.device_memory_gb is None else self.used.total <= self.device_memory_gb * 1e9


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
    global_batch_size: int = 64,
    recompute_dsa: bool = False,
    tflops: float | None = None,
    bandwidth_gb: float | None = None,
    bf16: bool = True,
    json_file: Path | None = None,
) -> int:
    """Print the plan of an upcycling run, or of training a whole DeepSeek-V3.2, and write it to `json_file` if given.

    Args:
        base: a Hugging Face directory or a config.json; weights are not needed.
        dsa_layers: DSA layers on top, unless `layer_pattern` says it all.
        dsa: sizes of the indexer; a DeepSeek-V3.2 has its own.
        parallel: sizes of the parallel groups.
        devices: in all.
        device_memory_gb: of one device, 1e9 bytes; None: nothing is said about fitting, nor recommended.
        seq_length, micro_batch_size: what a rank takes through the model at once.
        global_batch_size: samples of a step.
        recompute_dsa: layers that train keep their inputs only.
        tflops, bandwidth_gb: what a device reaches; both or none. Without them no time is given.
        bf16: width of weights and activations; off: fp32.
        json_file: layout.json.

    Returns:
        Exit code 0, also where the plan does not fit: that is an answer.

    Raises:
        UserError: the base, the pattern or the layout breaks a rule.
    """
    _check(seq_length, micro_batch_size, global_batch_size, device_memory_gb, tflops, bandwidth_gb)
    arch, pattern, dsa, found = _subject(base, dsa_layers, layer_pattern, dsa or DsaSettings())
    parallel = parallel or PlanParallel()
    layout = make_layout(parallel, devices, arch, len(pattern))
    if seq_length % layout.cp:
        raise UserError(f"--context-parallel-size must divide --seq-length: {seq_length} % {layout.cp} != 0; use a power of two")
    work = Work(seq_length, micro_batch_size, 2 if bf16 else 4, recompute_dsa)
    speeds = None if tflops is None or bandwidth_gb is None else Speeds(tflops, bandwidth_gb)
    micro_batches = ceil(global_batch_size / (layout.dp * micro_batch_size))
    cost = step_cost(found, arch, pattern, dsa, layout, work, micro_batches, speeds)
    by_name, model = count(found)
    used = bytes_per_device(found, arch, pattern, dsa, layout, work)
    recommended = None
    if device_memory_gb is not None:
        recommended = recommend(
            found, arch, pattern, dsa, devices=devices, memory_bytes=device_memory_gb * 1e9, work=work,
            global_batch_size=global_batch_size, speeds=speeds,
        )  # fmt: skip
    warnings = _warnings(parallel, layout, pattern, arch, used, device_memory_gb)
    if recommended is not None and not recommended.trains:
        text = "the training scripts refuse the recommended layout, and none that they take fits this memory and batch: change --devices or --global-batch-size"
        warnings.append({"code": "recommended_not_in_this_release", "text": text})
    if global_batch_size % (layout.dp * micro_batch_size):
        text = f"--global-batch-size {global_batch_size} is no multiple of {layout.dp} ranks x {micro_batch_size}: training refuses it"
        warnings.append({"code": "uneven_batch", "text": text})
    divides = batch_divides(arch, len(pattern), devices=devices, work=work, global_batch_size=global_batch_size)
    plan = Plan(
        pattern, by_name, model, layout, used, work, cost, global_batch_size, micro_batches, device_memory_gb, recommended, divides, warnings
    )
    console = Console()
    console.width = max(console.width, _MIN_WIDTH)
    show(console, plan)
    if json_file is not None:
        json_file.write_text(json.dumps(_document(plan), indent=2) + "\n")
    return 0


def _check(seq_length, micro_batch_size, global_batch_size, device_memory_gb, tflops, bandwidth_gb) -> None:
    numbers = (("--seq-length", seq_length), ("--micro-batch-size", micro_batch_size), ("--global-batch-size", global_batch_size))
    for name, value in numbers:
        if value < 1:
            raise UserError(f"{name} must be positive: {value}; give 1 or more")
    if device_memory_gb is not None and not 0 < device_memory_gb < float("inf"):
        raise UserError(f"--device-memory-gb must be positive: {device_memory_gb}; give the device's memory, e.g. 64")
    for name, value in (("--tflops", tflops), ("--bandwidth-gb", bandwidth_gb)):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{name} must be positive: {value}; give what a device reaches")
    if (tflops is None) != (bandwidth_gb is None):
        raise UserError("a time needs --tflops and --bandwidth-gb: one is missing; give both or none")


def _subject(
    base: Path, dsa_layers: int, layer_pattern: str | None, dsa: DsaSettings
) -> tuple[Architecture, tuple[str, ...], DsaSettings, list[Part]]:
    """(architecture, layer pattern, indexer, parts) of an upcycled base, or of a whole DeepSeek-V3.2."""
    if is_deepseek_v32(read_config(base)):
        if layer_pattern is not None:
            raise UserError(f"a DeepSeek-V3.2 trains whole, nothing is appended to it: --layer-pattern {layer_pattern}; leave it out")
        whole, own = read_deepseek_v32(base)
        return whole, appended_pattern(0, whole.num_layers), own, whole_parts(whole, own)
    arch = read_architecture(base)
    pattern = parse_layer_pattern(layer_pattern) if layer_pattern else appended_pattern(arch.num_layers, dsa_layers)
    check_pattern(pattern, arch.num_layers)
    return arch, pattern, dsa, parts(arch, pattern, dsa)


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
    if not arch.trains_whole and layout.pp > 1 and len(pattern) - len(pattern) // layout.pp <= arch.num_layers:
        text = "only the last stage trains: the others are done when their forward is"
        found.append({"code": "frozen_stages", "text": text})
    if device_memory_gb is not None and _CROWDED * device_memory_gb * 1e9 < used.total <= device_memory_gb * 1e9:
        text = "more than 90% of the device: communication buffers and fragmentation are not counted"
        found.append({"code": "crowded", "text": text})
    return found


def _groups(layout: Layout) -> dict[str, int]:
    return {key: getattr(layout, key) for key in ("tp", "pp", "ep", "etp", "cp", "dp")}


def _document(plan: Plan) -> dict:
    model, best = plan.model, plan.recommended
    document = {
        "schema": SCHEMA,
        "parameters": {"base": model.base, "trainable": model.trainable, "total": model.total, "active": model.active},
        "layout": _groups(plan.layout),
        "bytes_per_device": {**asdict(plan.used), "total": plan.used.total},
        "fits": plan.fits,
        "warnings": plan.warnings,
        "step": {
            "global_batch_size": plan.global_batch_size,
            "micro_batches": plan.micro_batches,
            "flops_per_device": plan.cost.flops,
            "bytes_sent_per_device": {**plan.cost.sent, "total": plan.cost.sent_total},
            "seconds": plan.cost.seconds,
        },
        "recommended": None,
    }
    if best is not None:
        document["recommended"] = {
            "layout": _groups(best.layout),
            "recompute_dsa": best.recompute,
            "trains": best.trains,
            "use_distributed_optimizer": best.layout.distributed_optimizer,
            "bytes_per_device": {**asdict(best.used), "total": best.used.total},
            "bytes_sent_per_device": {**best.cost.sent, "total": best.cost.sent_total},
            "seconds": best.cost.seconds,
        }
    return document


def show(console: Console, plan: Plan) -> None:
    """The tables."""
    table = Table(title=f"Parameters of {format_pattern(plan.pattern)}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("part", "frozen", "trainable", "total", "per token"):
        table.add_column(column, justify="left" if column == "part" else "right", no_wrap=True)
    for name, each in plan.by_name.items():
        table.add_row(name, *(f"{n:,}" for n in (each.base, each.trainable, each.total, each.active)))
    table.add_section()
    table.add_row("all", *(f"{n:,}" for n in (plan.model.base, plan.model.trainable, plan.model.total, plan.model.active)))
    console.print(table)

    groups = " ".join(f"{key}{value}" for key, value in _groups(plan.layout).items())
    width = "bf16" if plan.work.width == 2 else "fp32"
    console.print(f"On the fullest device, in GB of 1e9 bytes: {groups}, {plan.work.tokens} tokens at a time, {width}")
    notes = {
        "frozen": "frozen weights",
        "trainable": "trainable weights and fp32 gradients",
        "optimizer": "Adam" + (", spread over the data-parallel ranks" if plan.layout.distributed_optimizer else ""),
        "activations": "activations (estimate)",
        "logits": "logits of the loss",
    }
    _gigabytes(console, {note: getattr(plan.used, key) for key, note in notes.items()}, plan.used.total)
    if plan.fits is not None:
        console.print(f"{'fits' if plan.fits else 'does NOT fit'} a device of {plan.device_memory_gb:g} GB")
    batch = f"{plan.global_batch_size} samples, {plan.micro_batches} micro-batches a rank"
    console.print(f"\nA step of {batch}: {plan.cost.flops / 1e12:,.1f} TFLOP on the busiest device, which sends (GB)")
    _gigabytes(console, {kind: value for kind, value in plan.cost.sent.items() if value}, plan.cost.sent_total)
    if plan.cost.seconds is not None:
        console.print(f"estimated time of a step: {plan.cost.seconds:,.2f} s, nothing overlapped")
    _show_recommended(console, plan)
    for warning in plan.warnings:
        console.print(f"note ({warning['code']}): {warning['text']}", highlight=False, soft_wrap=True)


def _show_recommended(console: Console, plan: Plan) -> None:
    best = plan.recommended
    if plan.device_memory_gb is None:
        return
    if best is None:
        why = f"no layout fits {plan.device_memory_gb:g} GB; take more devices, fewer tokens at a time or another batch"
        if not plan.batch_divides:
            why = f"no layout of these devices divides a batch of {plan.global_batch_size}; give a --global-batch-size that they divide"
        console.print(f"recommended: none, {why}", soft_wrap=True)
        return
    flags = {
        "tensor-model-parallel-size": best.layout.tp,
        "pipeline-model-parallel-size": best.layout.pp,
        "expert-model-parallel-size": best.layout.ep,
        "expert-tensor-parallel-size": best.layout.etp,
    }
    words = [f"--{name} {value}" for name, value in flags.items() if value > 1]
    words += ["--sequence-parallel"] * (best.layout.tp > 1) + ["--recompute-dsa"] * best.recompute + ["--use-distributed-optimizer"]
    time = "" if best.cost.seconds is None else f", {best.cost.seconds:,.2f} s a step"
    numbers = f"{best.used.total / 1e9:,.1f} GB on the fullest device, {best.cost.sent_total / 1e9:,.1f} GB sent a step{time}"
    console.print(f"recommended: {' '.join(words)} ({numbers})", highlight=False, soft_wrap=True)


def _gigabytes(console: Console, rows: dict[str, int], total: int) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part")
    table.add_column("GB", justify="right")
    for name, value in rows.items():
        table.add_row(name, f"{value / 1e9:,.2f}")
    table.add_section()
    table.add_row("all", f"{total / 1e9:,.2f}")
    console.print(table)
