"""A run's log, wherever it is: which files belong to it, one row a step, and what had to be left out."""

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from megatron_patch.diagnosis.rl_formats import READERS, Reading, detect
from megatron_patch.errors import UserError

_EXPECTED = "verl's console text, its file logger's JSONL, TensorBoard events or a wandb offline run"
# A folder with more files than this is not a run's log; asking for the log itself beats reading a home directory.
MAX_FILES = 20_000


@dataclass
class Restart:
    """The log goes back: the run was started again from a checkpoint."""

    after: int
    """The last step before."""
    at: int
    """The step that follows in the log."""
    left_out: int
    """Steps of the earlier attempt, from `at` on, that are not looked at."""
    non_finite: int
    """Those of them that hold NaN or inf: the fault may be there."""


@dataclass
class Run:
    """Everything that was read of one run."""

    path: Path
    format: str
    files: list[Reading]
    also_there: list[str]
    """What else the directory holds of this run, with the reason why it was not read."""
    rows: dict[int, dict[str, float]]
    """Step -> metrics, in the order of steps."""
    restarts: list[Restart] = field(default_factory=list)

    @property
    def unreadable(self) -> int:
        """Lines or records that could not be read."""
        return sum(file.unreadable for file in self.files)


def read_run(path: Path, flag: str = "RUN") -> Run:
    """Read the log of one run.

    Args:
        path: a file, or a directory at any depth of which its logs lie.
        flag: the argument's name, for messages.

    Raises:
        UserError: nothing of verl's is there, or logs of several runs.
    """
    if not path.exists():
        raise UserError(f"{flag} must be a verl log or a directory with one: {path} does not exist; check the path")
    by_format: dict[str, list[Reading]] = {}
    for file, format in _candidates(path, flag):
        reading = READERS[format](file)
        if reading.rows:
            by_format.setdefault(format, []).append(reading)
    if not by_format:
        raise UserError(
            f"{flag} must be {_EXPECTED}: no line `step:N - name:value`, no row and no scalar in {path}; "
            "give the log of a run that did at least one step"
        )
    # The kind that covers most steps: verl opens its JSONL anew at each start, so that it may hold the last part alone.
    chosen = max(by_format, key=lambda each: (len(_steps(by_format[each])), -list(READERS).index(each)))
    files, copies = _one_run(sorted(by_format[chosen], key=_age), flag)
    rows, restarts = merge(files)
    also = [f"{each.path} ({format}, {len(_steps([each]))} steps): {chosen} covers as many steps or more"
            for format, readings in by_format.items() if format != chosen for each in readings]  # fmt: skip
    return Run(path, chosen, files, also + copies, rows, restarts)


def merge(files: list[Reading]) -> tuple[dict[int, dict[str, float]], list[Restart]]:
    """One row a step; later lines win. Where training steps go back, the earlier attempt ends before that step."""
    rows: dict[int, dict[str, float]] = {}
    restarts: list[Restart] = []
    last = None
    for reading in files:
        for step, values in reading.rows:
            # Validation is logged on its own too, at the step before training (again) starts: that is no restart.
            training = any(not name.startswith("val") for name in values)
            if training and last is not None and step < last:
                old = [rows.pop(each) for each in list(rows) if each >= step]
                bad = sum(any(not math.isfinite(value) for value in row.values()) for row in old)
                restarts.append(Restart(last, step, len(old), bad))
            rows.setdefault(step, {}).update(values)
            last = step if training else last
    return dict(sorted(rows.items())), restarts


def _candidates(path: Path, flag: str) -> list[tuple[Path, str]]:
    """Files that may be logs, with their formats."""
    if path.is_file():
        format = detect(path, certain=True)
        return [(path, format)] if format else []
    found = []
    seen = 0
    for folder, folders, names in os.walk(path):  # follows no links: wandb's latest-run would be read twice
        folders.sort()
        for name in sorted(names):
            seen += 1
            if seen > MAX_FILES:
                raise UserError(
                    f"{flag} must be a run's log: {path} holds more than {MAX_FILES} files; give the log itself"
                )
            file = Path(folder, name)
            if file.is_file() and (format := detect(file)):
                found.append((file, format))
    return found


def _steps(readings: list[Reading]) -> set[int]:
    return {step for reading in readings for step, _ in reading.rows}


def _age(reading: Reading) -> tuple[float | str, str]:
    """Sorts the files of one format by their start: by the time in their name where it has one, else by the last write."""
    if match := re.search(r"tfevents\.(\d+)", reading.path.name):
        return (float(match[1]), reading.path.name)
    if match := re.search(r"run-(\d{8})_(\d{6})", reading.path.parent.name):
        return (float(match[1] + match[2]), reading.path.name)
    return (reading.path.stat().st_mtime, reading.path.name)


def _one_run(readings: list[Reading], flag: str) -> tuple[list[Reading], list[str]]:
    """Leave copies out (Ray keeps the driver's lines twice), and refuse the logs of two runs.

    Two files belong to one run if they start at different steps (a continuation), or say so by their place: event files of
    one directory, wandb files of one run id.
    """
    kept: list[Reading] = []
    copies: list[str] = []
    for reading in sorted(readings, key=lambda each: -len(each.rows)):
        rows = dict(reading.rows)
        twin = next((each for each in kept if _first(each) == _first(reading)), None)
        if twin is not None and all(_same(rows[step], dict(twin.rows).get(step)) for step in rows):
            copies.append(f"{reading.path}: the same lines as {twin.path}")
            continue
        if twin is not None and _home(twin) != _home(reading):
            raise UserError(
                f"{flag} must be one run: {twin.path} and {reading.path} both start at step {_first(reading)} "
                "with different values; give one of them"
            )
        kept.append(reading)
    return sorted(kept, key=_age), copies


def _same(row: dict[str, float], other: dict[str, float] | None) -> bool:
    """NaN equals NaN here: a copy of a bad line is a copy."""
    return other is not None and repr(sorted(row.items())) == repr(sorted(other.items()))


def _first(reading: Reading) -> int:
    training = [step for step, values in reading.rows if any(not name.startswith("val") for name in values)]
    return training[0] if training else reading.rows[0][0]


def _home(reading: Reading) -> str:
    """What two files of one run share."""
    if "tfevents" in reading.path.name:
        return str(reading.path.parent)
    return str(reading.path.name if reading.path.suffix == ".wandb" else reading.path)
