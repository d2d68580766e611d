"""Ranks that agree: without these, one rank's mistake leaves the others waiting, or is said once for each rank."""

import contextlib
import io
import os
import time
import traceback

import pytest

from megatron_patch import errors
from megatron_patch.devices import ranks
from megatron_patch.errors import NonFiniteError, UserError
from tests.distributed import RankError, Ranks


def fails_on(number: int, error: Exception) -> tuple[int, str, bool]:
    """(exit code, what was printed, whether it was said) where one rank raises in an agreement."""

    def main():
        with ranks.agreement():
            if ranks.rank() == number:
                raise error
        raise AssertionError("a rank left the block although another failed in it")

    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        code = errors.run(main)
    return code, printed.getvalue()


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("rule: value;\n remedy"), 2, "error: rule: value; remedy\n"),
        (NonFiniteError("twice"), 3, "error: twice\n"),
        (FileNotFoundError(2, "No such file", "/x"), 2, "error: cannot use /x: No such file; check the path and its permissions\n"),
    ],
)
def test_a_mistake_on_any_rank_is_said_once_and_ends_all(two_ranks, number, error, code, line):
    assert two_ranks.run(fails_on, number, error) == [(code, line), (code, "")]


def collectives() -> tuple:
    import torch

    number = ranks.rank()
    with ranks.agreement():
        pass
    return ranks.count(), ranks.gather(number), ranks.broadcast(number), ranks.highest(number, torch.device("cpu"))


def test_collectives(two_ranks):
    assert two_ranks.run(collectives) == [(2, [0, 1], 0, 1.0)] * 2


def defect(number: int) -> str:
    try:
        with ranks.agreement():
            if ranks.rank() == number:
                raise KeyError("ours")
    except Exception:
        return traceback.format_exc().rstrip()
    raise AssertionError("a rank left the block although another failed in it")


def test_a_defect_in_an_agreement_shows_its_traceback_on_all_ranks(two_ranks):
    other, own = two_ranks.run(defect, 1)
    assert own.endswith("KeyError: 'ours'")
    assert "LostRanksError: rank 1 failed:\nTraceback" in other and other.endswith("KeyError: 'ours'")


def test_the_helper_kills_all_ranks_at_the_time_out():
    with Ranks(1) as pool:  # one is enough here: to start it takes seconds
        [pid] = pool.run(os.getpid)
        started = time.monotonic()
        with pytest.raises(RankError, match=r"rank 0: did not answer within 1 s"):
            pool.run(time.sleep, 60, timeout=1)
        assert time.monotonic() - started < 20
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_one_process_needs_no_group():
    with pytest.raises(KeyError), ranks.one_reason(), ranks.agreement():
        raise KeyError("ours")
    assert ranks.gather(3) == [3] and ranks.broadcast(3) == 3
