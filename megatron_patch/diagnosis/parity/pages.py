"""A parity report for people: parity.md, parity.png, lines on the console."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE, FIGURE = "parity.md", "parity.png"
_COLOURS = ("tab:blue", "tab:orange")
_RANGE = (1e-9, 1e9)  # neither a difference of 0 nor one that is not finite has a place on a logarithmic axis


_LOG_PROBS = {"mean": "mean difference", "p99": "p99", "max": "max", "k3": "k3"}


def _number(value: float | None, form: str = ".2e") -> str:
    """A number of the report, where null stands for one that is not finite."""
    return "not finite" if value is None else format(value, form)


def console_lines(report: Mapping[str, Any]) -> list[str]:
    """What the command prints."""
    probs, index, inputs = report["logprobs"], report["index"], report["inputs"]
    sides = " against ".join(f"{inputs[s]['side']} ({inputs[s]['dtype']})" for s in ("a", "b"))
    lines = [
        f"{sides}: {inputs['tokens']} tokens in {inputs['documents']} documents, top-k {inputs['topk']}",
        "log-probs: " + ", ".join(f"{text} {_number(probs[key])}" for key, text in _LOG_PROBS.items()),
    ]
    if report["router"]["agreement"] is not None:
        lines.append(f"routes: {report['router']['agreement']:.2%} of tokens and layers agree")
    if index["jaccard"] is not None:
        lines.append(
            f"selections: Jaccard {index['jaccard']:.4f}, ties {index['ties']}, future {index['future']}, other documents "
            f"{index['cross_doc']}"
        )
    lines += [f"{a['name']}: max difference {_number(a['logprob_max'])}{', closes it' if a['closes'] else ''}" for a in report["ablations"]]
    lines += [f"suspected: {s['fault']} ({s['text']}): {s['evidence']}" for s in report["suspected"]]
    lines += [f"because {reason}" for reason in report["reasons"]]
    return [*lines, f"verdict: {report['verdict']}"]


def markdown(report: Mapping[str, Any]) -> str:
    """`parity.md`."""
    lines = [f"# Parity: {report['verdict']}", ""]
    lines += [f"- {line}" for line in console_lines(report)[:-1]]
    lines += ["", "## Modules", "", *_module_table(report)]
    worst = report["logprobs"]["worst"]
    lines += ["", "## Tokens whose log-probs differ most", "", "| position | token | text | a | b |", "|---:|---:|---|---:|---:|"]
    lines += [f"| {w['position']} | {w['token']} | {_cell(w['text'])} | {_number(w['a'], '.4f')} | {_number(w['b'], '.4f')} |" for w in worst]
    lines += ["", "docs/parity.md explains the columns.", ""]
    return "\n".join(lines)


def _module_table(report: Mapping[str, Any]) -> list[str]:
    sides = [report["inputs"][s]["side"] for s in ("a", "b")]
    head = ["layer", "module", "max abs", "relative", "cosine", *(f"{side}: own error / limit" for side in sides)]
    lines = ["| " + " | ".join(head) + " |", "|---:|---|" + "---:|" * (len(head) - 2)]
    for row in report["modules"]:
        own = [_own(row["local"].get(side)) for side in sides]
        lines.append(
            f"| {row['layer']} | {row['module']} | {_number(row['max_abs'])} | {_number(row['rel'])} | {_number(row['cos'], '.6f')} "
            f"| {' | '.join(own)} |"
        )
    return lines


def _own(local: Mapping[str, Any] | None) -> str:
    if local is None:
        return "-"
    text = f"{_number(local['rel'], '.1e')} / {_number(local['limit'], '.1e')}"
    return f"**{text}**" if local["diverges"] else text


def _excess(local: Mapping[str, Any]) -> float:
    """A module's error over what rounding explains, or its gain's, whichever is more; within the axis."""
    pairs = [(local["rel"], local["limit"]), (local["off_gain"], local["gain_limit"])]
    ratios = [math.inf if found is None or not limit else found / limit for found, limit in pairs]
    return min(max(*ratios, _RANGE[0]), _RANGE[1])


def _cell(text: str | None) -> str:
    return "" if text is None else repr(text).replace("|", "\\|")


def write_figure(report: Mapping[str, Any], path: Path) -> None:
    """`parity.png`: error over limit of every module on each side, and the two sides' log-probs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    modules, scatter = figure.subplots(1, 2)
    sides = [report["inputs"][s]["side"] for s in ("a", "b")]
    for side, colour in zip(sides, _COLOURS, strict=True):
        points = [(i, r["local"][side]) for i, r in enumerate(report["modules"]) if side in r["local"]]
        modules.plot([i for i, _ in points], [_excess(local) for _, local in points], "o", markersize=4, color=colour, label=side, alpha=0.7)
    modules.axhline(1.0, color="tab:red", linewidth=1)
    modules.set_yscale("log")
    modules.set_xlabel("module, bottom to top")
    modules.set_title("a module's own error / what rounding explains")
    modules.legend(fontsize="small")
    worst = [w for w in report["logprobs"]["worst"] if None not in (w["a"], w["b"])]
    scatter.plot([w["a"] for w in worst], [w["b"] for w in worst], "o", markersize=5, color=_COLOURS[0])
    if worst:
        ends = [min(w["a"] for w in worst), max(w["a"] for w in worst)]
        scatter.plot(ends, ends, color="gray", linewidth=1)
    scatter.set_xlabel(f"log-prob, {sides[0]}")
    scatter.set_ylabel(f"log-prob, {sides[1]}")
    scatter.set_title("the tokens that differ most")
    figure.savefig(path, dpi=100)
