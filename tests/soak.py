"""Kill training at random and resume it, for as long as asked; the result must be the uninterrupted run's, bit for bit.

    python -m tests.soak --minutes 30                                      # or --kills 50; experts on two ranks
    python -m tests.soak --kills 20 --layout dp2 --no-distributed-optimizer
    python -m tests.soak --kills 20 --layout one --async-save

Each round trains the tiny base's DSA layers to the end in spite of kills: -9 to one rank, -9 to all, SIGTERM to one, at a
random moment from the start on, so also while a checkpoint is written. Checked after each: every rank has ended within
the time-out, SIGTERM lost no step, -9 none before the last checkpoint (with --async-save: the one before it, which is published
before another is begun); at the end: every loss, the weights, the optimizer.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from megatron_patch.checkpoint.manifest import iteration_path, saved_iterations
from megatron_patch.checkpoint.resume import choose_checkpoint
from megatron_patch.config import PRETRAIN, StartSettings, TrainSettings
from tests.killable import Job

KINDS = ("SIGKILL to one rank", "SIGKILL to all", "SIGTERM to one rank")
LAYOUTS = {  # name -> (ranks, flags)
    "one": (1, {}),
    "dp2": (2, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
}
STEPS, INTERVAL, PATIENCE = 60, 3, 60.0
FLAGS = {
    "train_iters": STEPS, "save_interval": INTERVAL, "keep_last": 2, "log_interval": 1, "seq_length": 128,
    "micro_batch_size": 1, "global_batch_size": 4, "indexer_warmup_iters": 10, "lr_warmup_iters": 5, "eval_interval": 0,
    "dsa_init": "copy", "distributed_timeout_minutes": 0.25,
}  # fmt: skip


@dataclass
class Tally:
    """What a soak did."""

    kills: Counter = field(default_factory=Counter)
    rounds: int = 0
    most_lost: int = 0
    writing: int = 0
    starts: int = 0

    def __str__(self) -> str:
        kinds = ", ".join(f"{self.kills[kind]} x {kind}" for kind in KINDS)
        return (
            f"{self.kills.total()} kills ({kinds}), {self.writing} of them while a checkpoint was written, in {self.starts} starts; "
            f"{self.rounds} runs ended as the uninterrupted one; "
            f"at most {self.most_lost} steps were lost (a checkpoint each {INTERVAL})"
        )


def soak(
    settings: TrainSettings, folder: Path, *, ranks: int, seed: int, minutes: float = 1e9, kills: int = sys.maxsize,
    write_seconds: float = 0.0,
) -> Tally:  # fmt: skip
    """Kill and resume until the time is over or so many kills are done, then let the last run end.

    Args:
        settings: of the run; its --save is replaced.
        folder: new directory for the runs and their output.
        write_seconds: that a checkpoint takes longer to write, so that kills meet it.

    Raises:
        AssertionError: work was lost, a process stayed, or the result differs.
    """
    chance, tally, deadline = random.Random(seed), Tally(), time.monotonic() + 60 * minutes
    whole = folder / "whole"
    run_to_end(with_save(settings, whole, resume=False), ranks, folder / "whole.log")
    while tally.rounds == 0 or (time.monotonic() < deadline and tally.kills.total() < kills):
        save, log = folder / f"run{tally.rounds}", folder / f"run{tally.rounds}.log"
        while (kind := chance.choice(KINDS)) and time.monotonic() < deadline and tally.kills.total() < kills:
            tally.starts += 1
            if killed(settings, save, log, ranks, kind, chance, tally, write_seconds):
                tally.kills[kind] += 1
            if saved_iterations(save)[-1:] == [STEPS]:
                break
        run_to_end(with_save(settings, save, resume=bool(saved_iterations(save))), ranks, log)
        same(whole, save)
        shutil.rmtree(save)
        tally.rounds += 1
    return tally


def with_save(settings: TrainSettings, save: Path, *, resume: bool) -> TrainSettings:
    """The settings with another --save; a directory without a checkpoint is emptied, as the scripts do."""
    if not resume:
        shutil.rmtree(save, ignore_errors=True)
    start = StartSettings(load=save if resume else None)
    return replace(settings, output=replace(settings.output, save=save), start=start)


def run_to_end(settings: TrainSettings, ranks: int, log: Path) -> None:
    with Job(settings, PRETRAIN, ranks, log) as job:
        assert job.wait(600) == [0] * ranks, log.read_text()


def killed(
    settings: TrainSettings, save: Path, log: Path, ranks: int, kind: str, chance: random.Random, tally: Tally,
    write_seconds: float,
) -> bool:  # fmt: skip
    """Start or resume the run and kill it at a random moment; whether it was still there to be killed."""
    before = saved_iterations(save)
    with Job(with_save(settings, save, resume=bool(before)), PRETRAIN, ranks, log, write_seconds=write_seconds) as job:
        pids = [process.pid for process in job.processes]
        wait_for_moment(job, save, chance)
        hit = all(process.is_alive() for process in job.processes)
        tally.writing += bool(list(save.glob(".iter_*.partial-*")))
        victims = range(ranks) if kind == "SIGKILL to all" else [chance.randrange(ranks)]
        for rank in victims:
            job.send(signal.SIGTERM if kind == "SIGTERM to one rank" else signal.SIGKILL, rank)
        codes = job.wait(PATIENCE)
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
    newest = choose_checkpoint(save, whole_state=True)[1].iteration if saved_iterations(save) else 0
    lost = last_step(save) - newest
    assert newest >= (before[-1] if before else 0), f"{newest} after {before}"
    assert lost <= INTERVAL * (1 + settings.output.async_save), f"{lost} steps were lost after {kind}\n{log.read_text()[-3000:]}"
    if kind == "SIGTERM to one rank" and codes == [0] * ranks:
        assert lost == 0
    elif kind != "SIGTERM to one rank" and hit:
        assert all(code != 0 for code in codes) or newest == STEPS, codes
    tally.most_lost = max(tally.most_lost, lost)
    return hit


def wait_for_moment(job: Job, save: Path, chance: random.Random) -> None:
    """Let a run go on: sometimes into its start, else some steps and a part of one, which may be that of a checkpoint."""
    steps = None if chance.random() < 0.2 else last_step(save) + chance.randrange(8)
    more = chance.uniform(0, 3.0 if steps is None else 0.3)
    until = time.monotonic() + PATIENCE
    while job.running and steps is not None and last_step(save) < steps and time.monotonic() < until:
        time.sleep(0.005)
    until = time.monotonic() + more
    while job.running and time.monotonic() < until:
        time.sleep(0.005)


def last_step(save: Path) -> int:
    """The newest whole row of metrics.jsonl."""
    file = save / "metrics.jsonl"
    rows = file.read_text().split("\n")[:-1] if file.exists() else []
    return max((json.loads(row)["iteration"] for row in rows), default=0)


def same(whole: Path, other: Path) -> None:
    """Losses of every step, weights and optimizer: bit for bit."""

    def numbers(save: Path) -> list:
        rows = [json.loads(row) for row in (save / "metrics.jsonl").read_text().splitlines()]
        return [[row[name] for name in ("iteration", "lm_loss", "indexer_kl", "grad_norm", "consumed_tokens")] for row in rows]

    assert numbers(whole) == numbers(other)
    for file in sorted(iteration_path(whole, STEPS).glob("*.safetensors")):
        a, b = load_file(file), load_file(iteration_path(other, STEPS) / file.name)
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a), file.name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--kills", type=int, default=sys.maxsize)
    parser.add_argument("--layout", choices=LAYOUTS, default="ep2", help="one process, two data-parallel ranks, experts on two ranks")
    parser.add_argument("--distributed-optimizer", action=argparse.BooleanOptionalAction, help="default: with several ranks")
    parser.add_argument("--async-save", action="store_true", help="write checkpoints while training goes on")
    parser.add_argument("--write-seconds", type=float, default=0.0, help="that a checkpoint takes longer to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.minutes >= 1e9 and arguments.kills == sys.maxsize:
        parser.error("give --minutes or --kills")
    from tests.tiny import make_tiny_base, make_tiny_tokenizer
    from tests.training.conftest import settings_of, write_text

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = make_tiny_base(folder / "base")
        make_tiny_tokenizer(base)
        ranks, flags = LAYOUTS[arguments.layout]
        sharded = arguments.distributed_optimizer if arguments.distributed_optimizer is not None else ranks > 1
        flags = FLAGS | flags | {"use_distributed_optimizer": sharded, "async_save": arguments.async_save}
        settings = settings_of(base, folder / "unused", write_text(folder, base), **flags)
        limits = {"minutes": arguments.minutes, "kills": arguments.kills, "write_seconds": arguments.write_seconds}
        print(soak(settings, folder, ranks=ranks, seed=arguments.seed, **limits))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
