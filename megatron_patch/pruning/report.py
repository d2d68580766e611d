"""`dsa-upcycle prune report`: statistics (and a plan) for people: a heat map, a coverage curve, report.md.

Shape letters: L MoE layers, E experts of a layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_patch.errors import EXIT_OK, UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.publish import atomic_directory, atomic_write_text, require_empty
from megatron_patch.io.strict_json import read_json
from megatron_patch.pruning.statistics import Statistics

HEAT_MAP, COVERAGE, PAGE = "heatmap.png", "coverage.png", "report.md"
SHARES = (0.25, 0.5, 0.75)  # of the experts, in the table
MOST_TICKS = 32


@dataclass(frozen=True)
class Plan:
    """What the report takes from a plan.json: kept old ids by layer, and its criterion."""

    path: Path
    criterion: str
    keep: int
    kept: dict[int, list[int]]


def run(stats: str | Path, output: str | Path, plan: str | Path | None = None) -> int:
    """Write the report to a new or empty directory.

    Args:
        stats: of `prune observe`.
        plan: of `prune plan`, made from these statistics.

    Raises:
        UserError: the statistics or the plan are not what they should be.
    """
    output, statistics = require_empty(output), Statistics.load(stats)
    planned = None if plan is None else read_plan(plan, statistics, file_sha256(stats))
    with atomic_directory(output) as directory:
        atomic_write_text(directory / PAGE, page(statistics, Path(stats), planned))
        write_heat_map(statistics, directory / HEAT_MAP, planned)
        write_coverage(statistics, directory / COVERAGE, planned)
    print(f"written: {output / PAGE}, {HEAT_MAP}, {COVERAGE}")
    return EXIT_OK


def read_plan(path: str | Path, statistics: Statistics, stats_sha256: str) -> Plan:
    """The plan, if it was made from these statistics.

    Raises:
        UserError: no plan, or one of other statistics or layers.
    """
    path = Path(path)
    try:
        content = read_json(path)
        kept = {int(layer): [int(i) for i in entry["kept"]] for layer, entry in content["layers"].items()}
        found = Plan(path, str(content["criterion"]), int(content["keep"]), kept)
        of_stats = content["stats_sha256"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"a plan is what `dsa-upcycle prune plan` wrote: {path}: {type(error).__name__} {error}; plan again"
        ) from None
    if of_stats != stats_sha256:
        raise UserError(
            f"the plan must be of these statistics: {path} was made from others (sha256 {str(of_stats)[:16]}); plan again"
        )
    numbers = set(range(statistics.num_experts))
    for layer, experts in kept.items():
        if layer in statistics.layers and not set(experts) <= numbers:
            raise UserError(f"kept experts must be from 0 to {statistics.num_experts - 1}: layer {layer} of {path} differs")
    return found


def coverage_curve(count_LE: Tensor) -> Tensor:
    """Share of routed traffic that the n most frequent experts of each layer take: float64 [L, E], n = 1..E.

    NaN for a layer without traffic.
    """
    ordered = count_LE.double().sort(dim=1, descending=True).values.cumsum(1)
    return ordered / ordered[:, -1:]


def kept_coverage(count_LE: Tensor, layers: tuple[int, ...], kept: Mapping[int, list[int]]) -> dict[int, float]:
    """Layer -> share of routed traffic that its kept experts take."""
    share = count_LE.double() / count_LE.sum(1, keepdim=True)
    return {layer: float(share[row, kept[layer]].sum()) for row, layer in enumerate(layers) if layer in kept}


def effective_experts(count_LE: Tensor) -> Tensor:
    """exp of the entropy of the routed traffic, float64 [L]: how many equally used experts would be as spread."""
    share = count_LE.double() / count_LE.sum(1, keepdim=True)
    return torch.special.entr(share).sum(1).exp()


def overlap_of_halves(first_LE: Tensor, second_LE: Tensor) -> float:
    """Mean over layers of |A and B| / |A or B| for the halves of the experts that two sources use most."""
    half = max(1, first_LE.shape[1] // 2)
    tops = [count.sort(dim=1, descending=True, stable=True).indices[:, :half].tolist() for count in (first_LE, second_LE)]
    shares = [len(set(a) & set(b)) / len(set(a) | set(b)) for a, b in zip(*tops, strict=True)]
    return sum(shares) / len(shares)


def page(statistics: Statistics, path: Path, plan: Plan | None) -> str:
    """report.md."""
    count_LE, experts = statistics.combined().count, statistics.num_experts
    sizes = [max(1, round(share * experts)) for share in SHARES]
    curve, spread = coverage_curve(count_LE), effective_experts(count_LE)
    of_plan = {} if plan is None else kept_coverage(count_LE, statistics.layers, plan.kept)
    lines = [
        "# Where the tokens go",
        "",
        f"- statistics: `{path}`, model `{statistics.model_type}` (sha256 `{statistics.model_sha256[:16]}`)",
        f"- {len(statistics.layers)} MoE layers of {experts} experts, top {statistics.top_k}",
    ]
    if plan is not None:
        lines += [
            f"- plan: `{plan.path}`, keeps {plan.keep} by {plan.criterion}; coverage {_range(list(of_plan.values()))}",
        ]
    lines += ["", "| source | tokens | never chosen | routing weights |", "|---|---:|---:|---|"]
    for name, source in statistics.sources.items():
        never, weights = int((source.count == 0).sum()), "yes" if source.has_gates else "no (ids only)"
        lines.append(f"| {name.replace('|', chr(92) + '|')} | {source.tokens:,} | {never} of {count_LE.numel()} | {weights} |")
    head = ["layer", "never chosen", "effective experts", "most used", *(f"coverage of {size}" for size in sizes)]
    head += ["kept", "coverage of kept"] if plan else []
    lines += ["", "| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for row, layer in enumerate(statistics.layers):
        top = int(count_LE[row].argmax())
        cells = [str(layer), str(int((count_LE[row] == 0).sum())), f"{spread[row]:.1f}"]
        cells += [f"{top} ({count_LE[row, top] / count_LE[row].sum():.1%})"]
        cells += [f"{curve[row, size - 1]:.1%}" for size in sizes]
        if plan:
            cells += [str(len(plan.kept.get(layer, []))), f"{of_plan[layer]:.1%}" if layer in of_plan else "-"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += _overlaps(statistics)
    lines += [
        "",
        f"![layer x expert]({HEAT_MAP})",
        "",
        f"![coverage]({COVERAGE})",
        "",
        "## How to read it",
        "- *coverage of n*: the share of all choices that the n most used experts of the layer take. With even use it is "
        f"n/{experts}; near that, frequency says little about which experts matter, and a criterion with routing weights "
        "(reap, gate_sum) says more.",
        "- *effective experts*: exp of the entropy of the choices.",
        "- *never chosen* is not *scored low*: the data may simply lack what the expert is for.",
        f"- The heat map shows how often an expert is chosen relative to even use (1 is {statistics.top_k}/{experts} of the "
        "tokens)" + ("; dropped experts are crossed out." if plan else "."),
    ]
    return "\n".join(lines) + "\n"


def _overlaps(statistics: Statistics) -> list[str]:
    names = list(statistics.sources)
    if len(names) < 2:
        return []
    lines = ["", "Overlap of the most used half of the experts (1: the same, mean over layers):", ""]
    lines += ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for one in names:
        others = (statistics.sources[other].count for other in names)
        cells = [f"{overlap_of_halves(statistics.sources[one].count, other):.2f}" for other in others]
        lines.append(f"| {one} | " + " | ".join(cells) + " |")
    return lines


def _range(values: list[float]) -> str:
    if not values:
        return "unknown"
    return f"{sum(values) / len(values):.1%} on average, {min(values):.1%} to {max(values):.1%} by layer"


def _figure(width: float, height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def write_heat_map(statistics: Statistics, path: Path, plan: Plan | None = None) -> None:
    """Use of each expert relative to even use; white is even, dropped experts of a plan are crossed out."""
    from matplotlib.colors import TwoSlopeNorm

    count_LE = statistics.combined().count.double()
    relative = count_LE / count_LE.mean(1, keepdim=True)
    layers, experts = relative.shape
    figure, axes = _figure(min(24.0, 3.0 + 0.12 * experts), min(16.0, 2.0 + 0.2 * layers))
    limit = max(2.0, float(relative.nan_to_num().quantile(0.99)))
    image = axes.imshow(
        relative.numpy(), aspect="auto", cmap="RdBu_r", norm=TwoSlopeNorm(1.0, 0.0, limit), interpolation="nearest"
    )
    figure.colorbar(image, ax=axes, label="use relative to even use")
    if plan is not None:
        dropped = [
            (e, row)
            for row, layer in enumerate(statistics.layers)
            if layer in plan.kept
            for e in sorted(set(range(experts)) - set(plan.kept[layer]))
        ]
        if dropped:
            axes.scatter(*zip(*dropped, strict=True), marker="x", s=10, color="black", linewidths=0.7)
    ticks = range(0, layers, -(-layers // MOST_TICKS))
    axes.set_yticks(ticks, [str(statistics.layers[row]) for row in ticks])
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    figure.savefig(path, dpi=130)


def write_coverage(statistics: Statistics, path: Path, plan: Plan | None = None) -> None:
    """Coverage against the number of kept experts: mean and range over layers, of all and of each source."""
    figure, axes = _figure(7.0, 4.5)
    numbers = range(1, statistics.num_experts + 1)
    curve = coverage_curve(statistics.combined().count)
    axes.fill_between(numbers, curve.amin(0), curve.amax(0), color="#1f77b4", alpha=0.2, label="range over layers")
    axes.plot(numbers, curve.mean(0), color="#1f77b4", label="all sources")
    if len(statistics.sources) > 1:
        for name, source in statistics.sources.items():
            axes.plot(numbers, coverage_curve(source.count).mean(0), linewidth=1, linestyle="dashed", label=name)
    axes.plot(numbers, [n / statistics.num_experts for n in numbers], color="black", linestyle="dotted", label="even use")
    if plan is not None:
        axes.axvline(plan.keep, color="#d62728", linewidth=1, label=f"plan: {plan.keep}")
    axes.set_xlabel("most used experts per layer")
    axes.set_ylabel("share of routed traffic")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(1, max(2, statistics.num_experts))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)

