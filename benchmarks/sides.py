"""Two sides of a measurement, each in a fresh process of one run; time is the best of the repeats, memory the rise of peak RSS.

A benchmark names its sides and gives a function that makes one: `prepare(side, **case)` returns a callable that does the work
once. The inputs are made before memory is read, so that only what the work needs counts.
"""

import contextlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKER = "--worker"


@dataclass(frozen=True)
class Measured:
    """Seconds of each repeat, by the clock and of this process's processor time, and the rise of the peak resident memory in MiB.

    Processor time is what to compare on a machine that others use too, and only with one thread.
    """

    seconds: list[float]
    cpu_seconds: list[float]
    memory: float

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def best_cpu(self) -> float:
        return min(self.cpu_seconds)


def measure(script: str, side: str, case: dict, repeats: int) -> Measured:
    """Run one side of `script` in a process of its own."""
    job = json.dumps({"side": side, "case": case, "repeats": repeats})
    done = subprocess.run([sys.executable, script, WORKER, job], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {side} of {case} failed:\n{done.stderr[-2000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def peak_mb() -> float:
    """Peak resident memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def serve(prepare: Callable[..., Callable[[], object]]) -> None:
    """In the worker: do the job of the command line, print what was measured, and leave."""
    if sys.argv[1:2] != [WORKER]:
        return
    job = json.loads(sys.argv[2])
    work = prepare(job["side"], **job["case"])
    before = peak_mb()
    seconds, cpu_seconds = [], []
    for _ in range(job["repeats"]):
        started, cpu_started = time.perf_counter(), time.process_time()
        work()
        cpu_seconds.append(time.process_time() - cpu_started)
        seconds.append(time.perf_counter() - started)
    memory = peak_mb() - before
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "memory": memory}))
    raise SystemExit(0)


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that both sides read from the disk."""
    for item in folder.rglob("*"):
        if item.is_file():
            number = os.open(item, os.O_RDONLY)
            os.fsync(number)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)


def timed(command: list[str]) -> tuple[float, float, str]:
    """Seconds, the seconds of CPU that it took, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def python(code: str) -> tuple[float, float, int]:
    """`timed` of a Python program, and its largest resident set in bytes.

    From VmHWM, which starts anew with a program; the figure of getrusage begins with that of the process that started it.
    """
    peak = "; print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    seconds, cpu, out = timed([sys.executable, "-c", code + peak])
    return seconds, cpu, int(re.search(r"VmHWM:\s+(\d+) kB", out)[1]) * 1024


def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def entry(name: str, unit: str, ours: float, theirs: float, *, goal: float | None, repeats: int, spread: float | None) -> dict:
    """A row of `--json FILE`; the ratio is our advantage: above 1 is better."""
    return {
        "name": name,
        "unit": unit,
        "ours": ours,
        "theirs": theirs,
        "ratio": theirs / ours if ours else None,
        "goal": goal,
        "repeats": repeats,
        "spread": spread,
        "versions": {"torch": version("torch"), "megatron-core": version("megatron-core"), "numba": _version("numba")},
    }


def spread(measured: Measured) -> float:
    """Of the repeats, relative to their median."""
    return (max(measured.seconds) - min(measured.seconds)) / statistics.median(measured.seconds)


def publish(rows: list[dict], json_file: Path | None) -> None:
    """Print the table, and write the file if one is asked for."""
    print("| measure | ours | theirs | ratio | goal |\n|---|---:|---:|---:|---:|")
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        goal = "-" if row["goal"] is None else f"{row['goal']:g}"
        print(f"| {row['name']} ({row['unit']}) | {row['ours']:.3g} | {row['theirs']:.3g} | {ratio} | {goal} |")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(rows, indent=2) + "\n")
