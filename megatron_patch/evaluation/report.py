"""`recovery.json` for people: a Markdown page, a figure, a table on the console."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_BARS = (("base", "base", "#7f7f7f"), ("model", "model", "#1f77b4"), ("bypassed", "DSA layers bypassed", "#ff7f0e"))
_BARS += (("scrambled_indices", "selected keys scrambled", "#d62728"),)
MIN_WIDTH = 110
_COLUMNS = ("task", "n", "chance", "base", "model", "ratio", "gain", "bypassed", "scrambled")


def task_cells(task: dict[str, Any]) -> list[str]:
    """One line of the table, as text."""
    base_error, model_error = task["stderr"]
    return [
        task["name"],
        str(task["n"]),
        f"{task['chance']:.3f}",
        _with_error(task["base"], base_error),
        _with_error(task["model"], model_error),
        _number(task["ratio"]) if task["counted"] else "not counted",
        f"{task['gain_over_base']:+.3f}",
        _number(task["bypassed"]),
        _number(task["scrambled_indices"]),
    ]


def print_console(recovery: dict[str, Any]) -> None:
    """The table and the findings on stdout."""
    table = Table(title=f"scores on suite {recovery['suite']['name']}", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "task" else "right")
    for task in recovery["tasks"]:
        table.add_row(*task_cells(task))
    console = Console()
    console.width = max(console.width, MIN_WIDTH)  # narrower, the table would lose digits
    console.print(table, markup=False)
    for line in findings(recovery):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def findings(recovery: dict[str, Any]) -> list[str]:
    """What the numbers mean, a sentence or two each."""
    summary, perplexity = recovery["summary"], recovery["perplexity"]
    scope = f" (scores alone; not measured: {', '.join(summary['not_measured'])})" if summary["not_measured"] else ""
    lines = [f"Verdict: {summary['verdict']}{scope}." + "".join(f" {reason}." for reason in summary["reasons"])]
    if summary["counted_tasks"]:
        lines.append(
            f"Over {summary['counted_tasks']} counted tasks the model keeps at least {summary['min_ratio']:.3f} and on "
            f"average {summary['mean_ratio']:.3f} of the base's score (threshold {summary['threshold']})."
        )
    size = f"{perplexity['documents']} documents, {perplexity['tokens']:,} tokens"
    sides = ", ".join(f"{side} {_or_not_measured(perplexity[side])}" for side in ("base", "model"))
    difference = ""
    if perplexity["loss_difference"] is not None:
        value = _signed(perplexity["loss_difference"], perplexity["loss_difference_stderr"])
        difference = f" Loss, model minus base: {value} nats per token (paired)."
    lines.append(f"Held-out perplexity over {size}: {sides}.{difference}")
    lines += _dsa_findings(recovery)
    return lines + [f"Warning: {warning}" for warning in recovery["warnings"]]


def _dsa_findings(recovery: dict[str, Any]) -> list[str]:
    participation = recovery["participation"]
    if participation is None:
        return []
    layers = ", ".join(
        f"layer {layer}: {kl:.4f}"
        for layer, kl in zip(participation["layers"], participation["per_layer"], strict=True)
    )
    lines = [
        f"Participation: bypassing all DSA layers changes the predictions by {participation['kl_nats']:.4f} nats per "
        f"token; each alone, {layers}. Scrambling the selected keys changes them by "
        f"{participation['scrambled_kl_nats']:.4f}."
    ]
    for task in recovery["tasks"]:
        lost = task["gain_lost_by_scrambling"]
        if lost is not None:
            lines.append(
                f"{task['name']}: the model gains {task['gain_over_base']:+.3f} over the base, of which scrambling the "
                f"selected keys takes away {lost:.0%}."
            )
    return lines


def markdown(recovery: dict[str, Any]) -> str:
    """`recovery.md`."""
    dsa = recovery["participation"] is not None
    lines = [
        f"# Scores on suite {recovery['suite']['name']}: {recovery['summary']['verdict']}",
        "",
        f"- base: `{recovery['base']['path']}` ({_identity(recovery['base'])})",
        f"- model: `{recovery['model']['path']}` ({_identity(recovery['model'])})",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|---|" + "---:|" * (len(_COLUMNS) - 1),
        *(
            "| " + " | ".join(cell.replace("|", r"\|") for cell in task_cells(task)) + " |"
            for task in recovery["tasks"]
        ),
        "",
        "![scores](recovery.png)",
        "",
        "## What it says",
        *(f"- {line}" for line in findings(recovery)),
        "",
        "## How to read it",
        "- Scores are exact matches: the fraction of rows where greedy decoding gives the answer and stops. ± is one "
        "standard error over rows.",
        "- *ratio* is model / base. A task is counted only where the base is above chance by more than two standard "
        "errors; elsewhere *gain*, model - base, is the figure to look at.",
    ]
    if dsa:
        lines += [
            "- *bypassed*: the DSA layers are skipped as a whole, which leaves the base. *scrambled*: every query of a "
            "DSA layer attends to as many keys as its indexer would select, but drawn at random from those allowed. "
            "Where the model is better than both, the sparse path does the work.",
            "- Scrambling changes nothing for a query with no more than top-k keys before it; `rows_beyond_topk` in "
            "recovery.json is the fraction of rows that are longer.",
        ]
    tasks = [f"- `{task['name']}`: {task['description']}" for task in recovery["tasks"] if task["description"]]
    lines += ["", "## Tasks", *tasks] if tasks else []
    lines += [
        "",
        "## The same with lm-eval's own command",
        f"lm-eval {recovery['lm_eval']['version']} scored this. Its command line on the tasks in `lm_eval/` gives the same "
        + ("figures, here for the base (it cannot mask one):" if recovery["model"].get("masked_base") else "figures, here for base and model:"),
        "```bash",
        *recovery["lm_eval"]["commands"],
        "```",
    ]
    return "\n".join(lines) + "\n"


def write_figure(recovery: dict[str, Any], path: Path) -> None:
    """`recovery.png`: bars per task, a dash for chance, perplexity in the title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks, perplexity = recovery["tasks"], recovery["perplexity"]
    shown = [bar for bar in _BARS if tasks[0][bar[0]] is not None]
    figure = Figure(figsize=(max(6.0, 1.5 * len(tasks) + 2.5), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / len(shown)
    for place, (key, label, colour) in enumerate(shown):
        x = [number - 0.4 + (place + 0.5) * width for number in range(len(tasks))]
        axes.bar(
            x, [task[key] for task in tasks], width, label=label, color=colour, yerr=_errors(tasks, key), capsize=2
        )
    chance = [task["chance"] for task in tasks]
    ends = [number - 0.42 for number in range(len(tasks))], [number + 0.42 for number in range(len(tasks))]
    axes.hlines(chance, *ends, colors="black", linestyles="dashed", linewidth=1, label="chance")
    names = [task["name"] if task["counted"] else f"{task['name']}\n(not counted)" for task in tasks]
    axes.set_xticks(range(len(tasks)), names)
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("exact match")
    values = ", ".join(f"{_or_not_measured(perplexity[side], 2)} ({side})" for side in ("base", "model"))
    axes.set_title(f"{recovery['suite']['name']}: {recovery['summary']['verdict']}; held-out perplexity {values}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5, frameon=False, fontsize="small")
    figure.savefig(path, dpi=130)


def _errors(tasks: list[dict[str, Any]], key: str) -> list[float] | None:
    """Standard errors of the two bars that have one; matplotlib draws none for NaN."""
    if key not in ("base", "model"):
        return None
    errors = [task["stderr"][key == "model"] for task in tasks]
    return [float("nan") if error is None else error for error in errors]


def _identity(side: dict[str, Any]) -> str:
    if side["sha256"] is None:
        return f"served as {side['served_name']}"
    masked = "the base masked by this plan, nothing was written; " if side.get("masked_base") else ""
    return f"{masked}sha256 `{side['sha256'][:16]}`"


def _or_not_measured(value: float | None, digits: int = 3) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def _signed(value: float, error: float | None) -> str:
    return f"{value:+.4f}" if error is None else f"{value:+.4f} ± {error:.4f}"
