"""Work spread over processes whose results come back in the order of the input, whatever the number of "
"processes."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from megatron_patch.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")
IN_FLIGHT_PER_WORKER = 4

_context: Any = None


def ordered_map(
    work: Callable[[Any, Item], Result], items: Iterable[Item], *, context: Any, workers: int
) -> Iterator[Result]:
    """`work(context, item)` for each item, in order. `context` is sent once to each worker, not with every item.

    At most `IN_FLIGHT_PER_WORKER` items per worker are read ahead: a pool's own `imap` would read the whole input into
    memory. An exception of `work` is raised at its item's turn, so that the first fault of the input is reported.

    Raises:
        UserError: `workers` below 1, or a worker was killed (out of memory).
    """
    if workers < 1:
        raise UserError(f"--workers must be at least 1: {workers}; use 1 to work in this process")
    if workers == 1:
        for item in items:
            yield work(context, item)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads inside every worker would fight for the same cores
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"  # fork: no second import
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context(method), initializer=_remember, initargs=(context,)
    )
    pending: deque = deque()
    try:
        for item in items:
            pending.append(pool.submit(_call, work, item))
            if len(pending) >= workers * IN_FLIGHT_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"a worker process was killed, likely for memory; use fewer than --workers {workers}"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _remember(context: Any) -> None:
    global _context
    _context = context


def _call(work: Callable[[Any, Item], Result], item: Item) -> Result:
    return work(_context, item)
