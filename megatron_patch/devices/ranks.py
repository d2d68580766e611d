"""What the processes of one run do together: agree, speak with one voice, and end with one reason.

Every function also works with one process, or before torch.distributed has started, where it costs nothing. All ranks
call them in the same order, as with any collective.
"""

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_patch import errors

_REASON = "megatron_patch/first_failure"


class LostRanksError(RuntimeError):
    """Another rank failed before this one; the message is its reason."""


def rank() -> int:
    """This process's number; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """Number of processes of the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is the one process that writes and prints."""
    return rank() == 0


def gather(value: Any) -> list:
    """Everybody's `value` (anything that pickles), by rank."""
    values = [value] * count()
    if count() > 1:
        dist.all_gather_object(values, value)
    return values


def broadcast(value: Any) -> Any:
    """Rank 0's `value`; what the others give is ignored."""
    box = [value]
    if count() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def highest(value: float, device: torch.device) -> float:
    """The largest `value` of all ranks."""
    if count() == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


@contextlib.contextmanager
def agreement() -> Iterator[None]:
    """A block that all ranks leave together: well, or each with the failure of the lowest rank that failed.

    No collective may stand inside: a rank that fails would leave the others waiting in it. After a mistake of the
    user's (`UserError`, `NonFiniteError`, a path that the system refuses), rank 0 says the one line and every rank
    raises it, marked as said. After a defect, the rank that has it raises it, and the others a `LostRanksError` with
    its traceback.
    """
    if count() == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failures = gather(None if error is None else _told(error))
    first = next((number for number, failure in enumerate(failures) if failure is not None), None)
    if first is None:
        return
    kind, text = failures[first]
    if kind is not None:
        agreed = kind(text)
        if is_main():
            errors.say(agreed)
        dist.barrier()  # torchrun ends all once one has left: not before the line is out
        agreed.said = True
        raise agreed from error
    if error is not None:
        raise error
    raise LostRanksError(f"rank {first} failed:\n{text}")


def _told(error: Exception) -> tuple[type | None, str]:
    """The class to raise on every rank and its line; (None, traceback) for a defect."""
    line = errors.as_line(error)
    if line is not None:
        return type(line), str(line)
    return None, "".join(traceback.format_exception(error))


@contextlib.contextmanager
def one_reason() -> Iterator[None]:
    """Around a whole run: a rank that fails between agreements leaves its reason for those that then miss it.

    Their collectives fail too, with an error about a connection; the first rank's reason, kept in the store through
    which the ranks met, is put in front of it. A rank that was killed leaves none, and a store that went with rank 0
    answers nothing; the error about the connection then stands alone.
    """
    try:
        yield
    except Exception as error:
        if count() == 1 or getattr(error, "said", False) or isinstance(error, LostRanksError):
            raise
        mine = f"rank {rank()} failed first, with {type(error).__name__}: {error}"
        first = _first_reason(mine)
        if first != mine:
            raise LostRanksError(first) from error
        raise


def _first_reason(mine: str) -> str:
    """The reason of the rank that gives one first."""
    try:
        return dist.distributed_c10d._get_default_store().compare_set(_REASON, "", mine).decode()
    except RuntimeError:  # the store is gone
        return mine
