"""An RL report for people: report.md, curves.png, lines on the console."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_patch.diagnosis.rl_curves import CURVES, VALIDATION, find_metric, metric_curve
from megatron_patch.diagnosis.rl_logs import Run
from megatron_patch.diagnosis.rl_symptoms import title

FIGURE, PAGE = "curves.png", "report.md"
SHOWN = 8  # steps and values of a symptom that fit a table; rl_report.json has all
_COLOURS = {"run": "tab:blue", "compare": "tab:orange"}
_STYLES = ("-", "--", ":")
# Panel -> its curves, and whether the axis is logarithmic: where a fault is a factor of 10 to 1000.
_PANELS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("reward", ("reward",), False),
    ("answer length (tokens)", ("length",), False),
    ("entropy (nats)", ("entropy",), False),
    ("grad_norm", ("grad_norm",), True),
    ("KL", ("kl", "ppo_kl"), False),
    ("rollout_probs_diff", ("probs_diff_mean", "probs_diff_std", "probs_diff_max"), True),
    ("clip ratio of answers", ("clip_ratio",), False),
    ("step time (s)", ("step_time",), False),
)


def console_lines(report: Mapping[str, Any]) -> list[str]:
    """What `dsa-upcycle rl-report` prints."""
    lines = []
    for label in ("run", "compare"):
        if (run := report[label]) is not None:
            lines.append(f"{label}: {run['path']}, {_coverage(run)}")
            lines += [f"  {note}" for note in _notes(run)]
    for each in report["symptoms"]:
        other = "" if each["also_in_other"] is None else f"; also in the other run: {_yes_no(each)}"
        lines.append(f"{each['id']}: {each['text']} ({each['metric']}){other}")
    lines.append(f"symptoms: {len(report['symptoms'])}; could not be tested: {len(report['not_tested'])}")
    return lines


def markdown(report: Mapping[str, Any]) -> str:
    """`report.md`."""
    compared = report["compare"] is not None
    lines = [f"# RL report: {len(report['symptoms'])} symptoms", ""]
    for label in ("run", "compare"):
        if (run := report[label]) is not None:
            lines += [f"- {label}: `{run['path']}`, {_coverage(run)}"]
            lines += [f"  - {_cell(note)}" for note in _notes(run)]
    lines += ["", "## Symptoms", ""]
    if report["symptoms"]:
        head = ["id", "what", "steps", "values", "threshold"] + (["also in the other run"] if compared else [])
        lines += _table(head, [_symptom_cells(each, compared) for each in report["symptoms"]])
    else:
        lines += ["None of those that could be tested."]
    if report["only_in_other"]:
        lines += ["", "Only in the other run: " + ", ".join(f"`{name}`" for name in report["only_in_other"]) + "."]
    if report["not_tested"]:
        lines += ["", "## Could not be tested", ""]
        lines += _table(["id", "what", "reason"], [[f"`{each['id']}`", title(each["id"]), each["reason"]]
                                                   for each in report["not_tested"]])  # fmt: skip
    lines += ["", "## Curves", "", f"![curves]({FIGURE})", ""]
    head = ["curve", "metric", "start", "end"] + (["start, other run", "end, other run"] if compared else [])
    lines += _table(head, [_curve_cells(name, each, compared) for name, each in report["curves"].items()])
    lines += ["", "*start* is the median of the first 10 steps, *end* of the last quarter."]
    return "\n".join(lines) + "\n"


def _coverage(run: Mapping[str, Any]) -> str:
    steps = run["steps"]
    missing = f", {steps['missing']} between them missing" if steps["missing"] else ""
    return f"{run['format']}, {steps['count']} steps from {steps['first']} to {steps['last']}{missing}"


def _notes(run: Mapping[str, Any]) -> list[str]:
    notes = [f"read: {each['path']} ({each['steps']} steps)" for each in run["files"]]
    notes += [f"not read: {each}" for each in run["not_read"]]
    for each in run["restarts"]:
        bad = f", {each['non_finite']} of them with NaN or inf" if each["non_finite"] else ""
        notes.append(
            f"restart: after step {each['after']} the log goes on at step {each['at']}; "
            f"{each['left_out']} steps of the earlier attempt are left out{bad}"
        )
    if run["unreadable"]:
        notes.append(f"{run['unreadable']} lines or records could not be read; the first: {run['first_unreadable']}")
    return notes


def _symptom_cells(each: Mapping[str, Any], compared: bool) -> list[str]:
    cells = [
        f"`{each['id']}`",
        f"{title(each['id'])}: {each['text']}",
        _abridged([str(step) for step in each["steps"]]),
        f"`{each['metric']}` " + _abridged([_number(value) for value in each["values"]]),
        f"{_number(each['threshold'])} ({each['rule']})" if each["threshold"] else each["rule"],
    ]
    return cells + ([_yes_no(each)] if compared else [])


def _yes_no(each: Mapping[str, Any]) -> str:
    return {True: "yes", False: "no", None: "not tested"}[each["also_in_other"]]


def _curve_cells(name: str, each: Mapping[str, Any], compared: bool) -> list[str]:
    keys = ["start", "end"] + (["other_start", "other_end"] if compared else [])
    return [name, f"`{each['metric']}`", *(_number(each[key]) for key in keys)]


def _abridged(items: list[str]) -> str:
    if len(items) <= SHOWN:
        return ", ".join(items)
    half = SHOWN // 2
    return ", ".join([*items[:half], "...", *items[-half:]]) + f" ({len(items)} in all)"


def _number(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows),
    ]


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


def write_figure(run: Run, compare: Run | None, symptoms: list[Mapping[str, Any]], path: Path) -> None:
    """`curves.png`: a panel a subject, the compared run in a second colour, marks where a symptom stands."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 14), layout="constrained")
    FigureCanvasAgg(figure)
    for (name, curves, logarithmic), axes in zip(_PANELS, figure.subplots(len(_PANELS) // 2, 2).flat, strict=True):
        for label, each in (("run", run), ("compare", compare)):
            if each is not None:
                _draw(axes, each, label, curves)
        _mark(axes, [find_metric(run.rows, each) for each in curves], symptoms)
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if any((line.get_ydata() > 0).any() for line in axes.get_lines()) and logarithmic:
            axes.set_yscale("log")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
        else:
            axes.text(0.5, 0.5, "not logged", ha="center", va="center", transform=axes.transAxes, color="gray")
    figure.savefig(path, dpi=100)


def _draw(axes, run: Run, label: str, curves: tuple[str, ...]) -> None:
    """One run's curves of a panel; a lone point needs a marker to be seen. Validation joins the reward as dots."""
    metrics = [(find_metric(run.rows, name), style) for name, style in zip(curves, _STYLES)]
    for metric, style in metrics:
        if metric is not None:
            c = metric_curve(run.rows, metric)
            marker = "." if len(c) < 3 else None
            axes.plot(
                c.steps, c.values, style, color=_COLOURS[label], label=f"{label}: {metric}", linewidth=1, marker=marker
            )
    if curves == ("reward",):
        for metric in sorted({key for row in run.rows.values() for key in row if key.startswith(VALIDATION)})[:1]:
            c = metric_curve(run.rows, metric)
            axes.plot(
                c.steps, c.values, "o", color=_COLOURS[label], label=f"{label}: {metric}", markersize=4, alpha=0.6
            )


def _mark(axes, metrics: list[str | None], symptoms: list[Mapping[str, Any]]) -> None:
    """Red crosses at the values that a symptom names."""
    for each in symptoms:
        points = [(s, v) for s, v in zip(each["steps"], each["values"], strict=True) if not isinstance(v, str)]
        if each["metric"] in metrics and points:
            axes.plot(*zip(*points, strict=True), "x", color="tab:red", label=each["id"], markersize=5)


def curve_names() -> list[str]:
    """The curves of the table, in the order of the figure."""
    drawn = [name for _, curves, _ in _PANELS for name in curves]
    return drawn + [name for name in CURVES if name not in drawn]
