"""Run functions on several gloo ranks: spawned processes that meet as torchrun's do, the CPU redirect active in each."""

import contextlib
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_STOP = None


def meeting_point() -> tuple[Any, dict[str, str]]:
    """A store that this process holds as torchrun's agent does, and the variables with which ranks find it.

    Its port is taken from the first moment: one that is only looked up for rank 0 to open seconds later may be somebody else's
    by then, where several tests run at once.
    """
    from torch.distributed import TCPStore  # here: ranks import this module, and set their threads before torch

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


class RankError(AssertionError):
    """A rank failed or was silent; `reports` holds each rank's traceback, or what became of it."""

    def __init__(self, reports: dict[int, str]):
        super().__init__("\n".join(f"rank {rank}: {report}" for rank, report in sorted(reports.items())))
        self.reports = reports


class Ranks:
    """Processes that run one function after another, so that they import and meet once.

    A rank whose function raises ends, as a training process would; the next `run` starts all anew. Use it as a context
    manager: no process is left.

    Args:
        count: ranks.
        timeout: seconds that one `run` may take; then all are killed.
    """

    def __init__(self, count: int, timeout: float = 120):
        self.count, self.timeout = count, timeout
        self._ranks: list[tuple[Any, Connection]] = []
        self._store: Any = None

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def run(self, function: Callable, *args, timeout: float | None = None) -> list:
        """`function(*args)` on every rank at once; their results, by rank.

        Args:
            function: of a module's top level (it is pickled).
            timeout: instead of the pool's.

        Raises:
            RankError: a rank raised, ended or took too long. The others had until the time-out to end by themselves.
        """
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send((function, args))
        deadline = time.monotonic() + (timeout or self.timeout)
        results: dict[int, Any] = {}
        reports: dict[int, str] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                rank = waiting.pop(connection)
                try:
                    worked, value = connection.recv()
                except EOFError:
                    process = self._ranks[rank][0]
                    process.join(5)
                    worked, value = False, f"ended with {process.exitcode} before it answered"
                (results if worked else reports)[rank] = value
        reports |= dict.fromkeys(waiting.values(), f"did not answer within {timeout or self.timeout} s and was killed")
        if reports:
            self._kill()
            raise RankError(reports)
        return [results[rank] for rank in range(self.count)]

    def close(self) -> None:
        """End all processes."""
        for _, connection in self._ranks:
            with contextlib.suppress(OSError):  # a rank that has ended by itself
                connection.send(_STOP)
        for process, _ in self._ranks:
            process.join(10)
        self._kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._store, meeting = meeting_point()
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.count, meeting, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _kill(self) -> None:
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks, self._store = [], None


def _serve(rank: int, count: int, meeting: dict[str, str], connection: Connection) -> None:
    os.environ |= meeting | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    import torch

    from megatron_patch.devices.device import activate, initialize_distributed

    torch.set_num_threads(1)
    initialize_distributed(activate("cpu"), seed=1)
    while (task := connection.recv()) is not _STOP:
        function, args = task
        try:
            _forget_scales()
            connection.send((True, function(*args)))
        except BaseException:
            sys.stderr.flush()
            connection.send((False, traceback.format_exc()))
            os._exit(1)
    os._exit(0)  # without the farewells of torch.distributed, which wait for ranks that may be gone


def _forget_scales() -> None:
    """What megatron-core keeps in classes, as in `conftest`."""
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
