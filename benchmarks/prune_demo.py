"""How much of the demo base's task scores is left with fewer experts: criteria x kept experts, against random keeping.

    python benchmarks/prune_demo.py --base runs/demo/base --json runs/prune_demo.json

Experts are chosen by statistics over training conversations (never the suite's rows) and scored on the suite with masked
routers, so nothing is written. Two ways of choosing: `all tasks` keeps one set of experts for all tasks, `own task` one
set per task from that task's conversations alone. The first table is the mean over tasks of exact match, divided by the
whole base's; the second the lowest ratio of a task to the whole base, by which `evaluate` gives its verdict; the third
is task by task with half of the experts. Random keeping is the mean of several draws, with the lowest and highest in
brackets.
"""

import json
import random
import statistics as stdlib_statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import tyro

from megatron_patch.demo.corpus import load_corpus
from megatron_patch.demo.demo_data import write_jsonl
from megatron_patch.demo.tasks import TASKS, conversation
from megatron_patch.evaluation.encode import encode_documents, encode_rows
from megatron_patch.evaluation.lm_eval_tasks import write_lm_eval_tasks
from megatron_patch.evaluation.loading import inspect_directory, load_common_tokenizer, load_model
from megatron_patch.evaluation.scores import score_task, wrap_model
from megatron_patch.evaluation.suite import read_suite
from megatron_patch.pruning.criteria import scores, select
from megatron_patch.pruning.masked import masked
from megatron_patch.pruning.observe import Settings, run
from megatron_patch.pruning.statistics import SourceStatistics, Statistics
from megatron_patch.pruning.wish import CRITERIA

CALIBRATION_SEED = 7
Kept = dict[int, list[int]]


class Relative(NamedTuple):
    """Exact match over the whole base's: of the means over tasks, of the worst task, and of each task."""

    mean: float
    worst: float
    tasks: dict[str, float]


@dataclass
class Arguments:
    base: Path
    """A directory of `dsa-upcycle demo-base`."""
    keep: tuple[int, ...] = (7, 6, 5, 4, 3, 2)
    """Experts kept in each layer."""
    conversations: int = 60
    """Calibration conversations per task."""
    rows: int = 100
    """Scored rows per task."""
    seeds: int = 3
    """Draws of random keeping."""
    json: Path | None = None
    """Also write the figures here."""


def observed(base: Path, conversations: int) -> Statistics:
    """Statistics of the base, one source per task that it was taught."""
    corpus, rng = load_corpus(1234), random.Random(CALIBRATION_SEED)
    with tempfile.TemporaryDirectory() as folder:
        data = {}
        for task in TASKS:
            if task.taught_to_base:
                data[task.name] = Path(folder) / f"{task.name}.jsonl"
                chats = (conversation(task, rng, corpus.base) for _ in range(conversations))
                write_jsonl(data[task.name], ({"messages": chat} for chat in chats))
        run(Settings(base, data, chat=True, batch_size=16, device="cpu"), Path(folder) / "statistics.safetensors")
        return Statistics.load(Path(folder) / "statistics.safetensors")


def at_random(layers: tuple[int, ...], experts: int, keep: int, seed: int) -> Kept:
    rng = random.Random(seed)
    return {layer: sorted(rng.sample(range(experts), keep)) for layer in layers}


class Scorer:
    """Exact match of one model per task, with masked routers, through lm-eval as `evaluate` scores."""

    def __init__(self, base: Path, rows: int, folder: Path):
        tokenizer = load_common_tokenizer(base, base)
        suite = read_suite(base / "demo_data" / "suite", rows)
        encoded = [encode_rows(tokenizer, task.rows) for task in suite.tasks]
        documents = encode_documents(tokenizer, suite.held_out)
        self.model = load_model(inspect_directory(base))
        self.lm = wrap_model(self.model, tokenizer, batch_size=25)
        self.files = write_lm_eval_tasks(folder, suite, encoded, documents, tokenizer.eos_token)
        named = zip(suite.tasks, self.files.exact, strict=True)
        self.tasks = {task.name: name for task, name in named if task.taught_to_base}

    def score(self, kept: Mapping[str, Kept]) -> dict[str, float]:
        """Task -> exact match with that task's kept experts; an empty set is the whole model."""
        found = {}
        for task, name in self.tasks.items():
            with masked(self.model, kept[task]):
                found[task] = float(score_task(self.lm, self.files, name).mean())
        return found


def main(arguments: Arguments) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, Scorer(arguments.base, arguments.rows, Path(folder)))


def measure(arguments: Arguments, scorer: Scorer) -> None:
    seen = observed(arguments.base, arguments.conversations)
    names = list(scorer.tasks)
    whole = scorer.score({name: {} for name in names})
    print(f"whole base: {', '.join(f'{name} {value:.2f}' for name, value in whole.items())}", flush=True)
    unknown = [name for name in names if not whole[name]]
    if unknown:
        raise SystemExit(f"error: a base to prune must know its tasks: it scores 0 on {', '.join(unknown)}; train it without --fast")

    def relative(kept: Mapping[str, Kept]) -> Relative:
        left = scorer.score(kept)
        mean = stdlib_statistics.mean(left.values()) / stdlib_statistics.mean(whole.values())
        ratios = {name: left[name] / whole[name] for name in names}
        return Relative(mean, min(ratios.values()), ratios)

    def chosen(source: SourceStatistics, criterion: str, keep: int) -> Kept:
        rows_LE = scores(source, criterion)
        return {layer: select(row_E, keep) for layer, row_E in zip(seen.layers, rows_LE, strict=True)}

    rows: list[dict[str, list[Relative]]] = []
    everything = seen.combined()
    for keep in arguments.keep:
        draws = (at_random(seen.layers, seen.num_experts, keep, seed) for seed in range(arguments.seeds))
        row = {"random": [relative(dict.fromkeys(names, kept)) for kept in draws]}
        for criterion in CRITERIA:
            of_all = chosen(everything, criterion, keep)
            row[f"{criterion}, all tasks"] = [relative(dict.fromkeys(names, of_all))]
            row[f"{criterion}, own task"] = [relative({n: chosen(seen.sources[n], criterion, keep) for n in names})]
        rows.append(row)
        print(f"{keep} of {seen.num_experts} done", flush=True)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(entries(arguments.keep, rows), indent=2) + "\n")
    kept = [f"{keep} of {seen.num_experts}" for keep in arguments.keep]
    print_table("mean over tasks", kept, [{k: [r.mean for r in v] for k, v in row.items()} for row in rows])
    print_table("worst task", kept, [{k: [r.worst for r in v] for k, v in row.items()} for row in rows])
    half = seen.num_experts // 2
    if half in arguments.keep:
        row = rows[arguments.keep.index(half)]
        by_task = [{k: [r.tasks[name] for r in v] for k, v in row.items()} for name in names]
        print_table(f"{half} of {seen.num_experts} experts, task by task", names, by_task, first="task")


def entries(keeps: Sequence[int], rows: Sequence[dict[str, list[Relative]]]) -> list[dict]:
    """As every benchmark writes them: a criterion against random keeping, whose mean and extremes over draws are given."""
    found = []
    for keep, row in zip(keeps, rows, strict=True):
        for measure, read in measures(row).items():
            draws = [read(draw) for draw in row["random"]]
            theirs = stdlib_statistics.mean(draws)
            for criterion in [name for name in row if name != "random"]:
                ours = read(row[criterion][0])
                found.append(
                    {
                        "name": f"prune_demo/{measure}/{criterion}/keep={keep}",
                        "unit": "share of the whole base's score",
                        "ours": ours,
                        "theirs": theirs,
                        "ratio": ours / theirs if theirs else None,
                        "goal": None,
                        "repeats": len(draws),
                        "spread": max(draws) - min(draws),
                        "versions": {"torch": torch.__version__},
                    }
                )
    return found


def measures(row: Mapping[str, list[Relative]]) -> dict[str, Callable[[Relative], float]]:
    """What is reported of a way of keeping: mean, worst, and each task."""
    found: dict[str, Callable[[Relative], float]] = {"mean": lambda r: r.mean, "worst": lambda r: r.worst}
    return found | {f"task={name}": lambda r, name=name: r.tasks[name] for name in row["random"][0].tasks}


def print_table(title: str, kept: list[str], rows: list[dict[str, list[float]]], first: str = "kept") -> None:
    """Markdown."""
    print(f"\n{title}, relative to the whole base\n\n| {first} | " + " | ".join(rows[0]) + " |")
    print("|" + "---:|" * (len(rows[0]) + 1))
    for name, row in zip(kept, rows, strict=True):
        print(f"| {name} | " + " | ".join(map(_cell, row.values())) + " |")


def _cell(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{stdlib_statistics.mean(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
