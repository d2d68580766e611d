"""`dsa-upcycle rl-report`: read the log of a verl run, draw its curves, name its symptoms, also against a second run."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_patch.diagnosis.rl_curves import find_metric, metric_curve
from megatron_patch.diagnosis.rl_logs import Run, read_run
from megatron_patch.diagnosis.rl_pages import FIGURE, PAGE, console_lines, curve_names, markdown, write_figure
from megatron_patch.diagnosis.rl_symptoms import DETECTORS, START, Symptom, examine, title
from megatron_patch.errors import EXIT_OK, UserError
from megatron_patch.io.publish import atomic_directory, atomic_write_json, atomic_write_text, require_empty

SCHEMA = 1
REPORT = "rl_report.json"
ANY = "any"
# Not 2, which is the user's input, and not 0. A defect of ours ends with 1 too, but then no report is written.
EXIT_FOUND = 1


def run(
    log: Path,
    output: Path,
    *,
    compare: Path | None = None,
    json_file: Path | None = None,
    fail_on: Sequence[str] = (),
) -> int:
    """Write report.md, curves.png and rl_report.json, and print the symptoms.

    Args:
        log: a verl log, or a directory with one.
        output: a new or empty directory.
        compare: the log of another run: a symptom that both have is no matter of what differs between them.
        json_file: rl_report.json once more.
        fail_on: ids of symptoms, or "any".

    Returns:
        0, whatever was found. With `fail_on` 1 if one of those was found, or was named and could not be tested.

    Raises:
        UserError: no verl log is there, or `fail_on` names no symptom.
    """
    _check_ids(fail_on)
    require_empty(output)
    first = read_run(log)
    second = None if compare is None else read_run(compare, "--compare")
    report = make_report(first, second)
    report["failed_on"] = _failed(report, fail_on)
    with atomic_directory(output) as folder:
        atomic_write_json(folder / REPORT, report)
        atomic_write_text(folder / PAGE, markdown(report))
        write_figure(first, second, report["symptoms"], folder / FIGURE)
    if json_file is not None:
        atomic_write_json(json_file, report)
    for line in console_lines(report):
        print(line)
    print(f"report: {output / PAGE}")
    if report["failed_on"]:
        print(f"--fail-on: {', '.join(report['failed_on'])}")
        return EXIT_FOUND
    return EXIT_OK


def make_report(first: Run, second: Run | None) -> dict[str, Any]:
    """The content of rl_report.json, without `failed_on`."""
    found, not_tested = examine(first.rows)
    other, other_not_tested = examine(second.rows) if second is not None else ({}, {})
    symptoms = []
    for name, symptom in found.items():
        also = None if second is None or name in other_not_tested else name in other
        symptoms.append(_symptom(name, symptom, also))
    return {
        "schema": SCHEMA,
        "run": _run(first),
        "compare": None if second is None else _run(second),
        "symptoms": symptoms,
        "only_in_other": [name for name in other if name not in found],
        "not_tested": [{"id": name, "reason": reason} for name, reason in not_tested.items()],
        "curves": _curves(first, second),
    }


def _symptom(name: str, symptom: Symptom, also: bool | None) -> dict[str, Any]:
    return {
        "id": name,
        "title": title(name),
        "metric": symptom.metric,
        "steps": symptom.steps,
        "values": [_json_number(value) for value in symptom.values],
        "threshold": symptom.threshold,
        "rule": symptom.rule,
        "text": symptom.text,
        "also_in_other": also,
    }


def _json_number(value: float) -> float | str:
    """JSON has no NaN, and here it is the finding itself: "nan", "inf" or "-inf"."""
    return value if math.isfinite(value) else str(value)


def _run(run: Run) -> dict[str, Any]:
    steps = list(run.rows)
    complaints = [f"{file.path} {file.first_unreadable}" for file in run.files if file.first_unreadable]
    return {
        "path": str(run.path),
        "format": run.format,
        "files": [{"path": str(file.path), "steps": len({step for step, _ in file.rows})} for file in run.files],
        "not_read": run.also_there,
        "steps": {
            "first": steps[0],
            "last": steps[-1],
            "count": len(steps),
            "missing": steps[-1] - steps[0] + 1 - len(steps),
        },
        "unreadable": run.unreadable,
        "first_unreadable": complaints[0] if complaints else None,
        "restarts": [vars(restart) for restart in run.restarts],
    }


def _curves(first: Run, second: Run | None) -> dict[str, dict[str, Any]]:
    """Level at the start and at the end of each curve that one of the runs has."""
    table: dict[str, dict[str, Any]] = {}
    for name in curve_names():
        metric = find_metric(first.rows, name)
        other = find_metric(second.rows, name) if second is not None else None
        if metric or other:
            start, end = _levels(first, metric)
            other_start, other_end = _levels(second, other)
            table[name] = {
                "metric": metric or other,
                "start": start,
                "end": end,
                "other_start": other_start,
                "other_end": other_end,
            }
    return table


def _levels(run: Run | None, metric: str | None) -> tuple[float | None, float | None]:
    values = metric_curve(run.rows, metric).values if run is not None and metric is not None else ()
    if not len(values):
        return None, None
    return float(np.median(values[:START])), float(np.median(values[-max(1, len(values) // 4) :]))


def _check_ids(fail_on: Sequence[str]) -> None:
    for name in fail_on:
        if name != ANY and name not in DETECTORS:
            raise UserError(f"--fail-on takes ids of symptoms or {ANY}: unknown {name}; ids: {', '.join(DETECTORS)}")


def _failed(report: dict[str, Any], fail_on: Sequence[str]) -> list[str]:
    """Of `fail_on`, what was found; a symptom asked for by name that could not be tested has not been excluded either."""
    found = [each["id"] for each in report["symptoms"]]
    untested = [each["id"] for each in report["not_tested"]]
    failed = [name for name in found if ANY in fail_on or name in fail_on]
    return failed + [f"{name} (not tested)" for name in untested if name in fail_on]
