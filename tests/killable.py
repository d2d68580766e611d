"""Training runs as processes that may be killed at any time: forked from a server that has imported everything.

A rank starts in a fraction of a second, so that a test can kill many. They meet as torchrun's do.
"""

import contextlib
import multiprocessing
import os
import time
from pathlib import Path

from megatron_patch.config import TrainSettings
from tests.distributed import meeting_point

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.killable_rank"])
EVENTS = ("weights written", "manifest written", "published", "old one half removed")


class Job:
    """The ranks of one run; leaving the context kills what is left of them.

    Args:
        settings: of the run.
        kind: "pretrain" or "sft".
        count: ranks.
        log: file that takes the output of all ranks.
        kill_at: one of `EVENTS`; rank 0 kills itself there.
        write_seconds: that every rank's writing of a checkpoint takes longer.
    """

    def __init__(
        self, settings: TrainSettings, kind: str, count: int, log: Path, kill_at: str | None = None, write_seconds: float = 0.0
    ):
        from tests.killable_rank import run_rank

        self._store, meeting = meeting_point()
        of_all = (settings, kind, log, kill_at, write_seconds)
        self.processes = [_CONTEXT.Process(target=run_rank, args=(rank, count, meeting, *of_all)) for rank in range(count)]
        for process in self.processes:
            process.start()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    @property
    def running(self) -> bool:
        """Whether a rank has not ended."""
        return any(process.is_alive() for process in self.processes)

    def send(self, number: int, rank: int) -> None:
        """A signal to one rank, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, number)

    def wait(self, seconds: float) -> list[int]:
        """Exit codes by rank; a killed rank's is minus its signal.

        Raises:
            AssertionError: one was still there after `seconds`: it would be an orphan.
        """
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        left = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        assert not left, f"ranks {left} were there after {seconds} s"
        return [process.exitcode for process in self.processes]
