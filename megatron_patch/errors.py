"""How a run ends badly: one line for the user, one exit code that scripts can rely on."""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable

EXIT_OK = 0
EXIT_INTERNAL = 1
EXIT_USER = 2
EXIT_NON_FINITE = 3
EXIT_INTERRUPTED = 130  # by Ctrl-C, as shells say

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_AUTOLOAD = "Failed to load the backend extension"  # torch/__init__.py: a torch_npu whose CANN is not there, most often

# How long a rank leaves the word to its machine's first one, which most likely says the same.
OTHERS_SPEAK_FIRST = 5.0


class UserError(ValueError):
    """The user's input breaks a rule. The message is one line: the rule, the value, the remedy.

    Attributes:
        said: whether the line has been printed, for all ranks of a run.
    """

    said = False


class NonFiniteError(RuntimeError):
    """Loss or gradients were not finite too many steps in a row. `said` as in `UserError`."""

    said = False


def run(main: Callable[[], int | None]) -> int:
    """Call `main` and translate its end into an exit code.

    Returns:
        What `main` returned (None is 0), 2 after a `UserError` or a path that the system refuses, 3 after a
        `NonFiniteError`; these print one line on stderr and no traceback. 0 where the reader of the output has left. Any
        other exception passes through: it is a defect of ours and its traceback helps.
    """
    try:
        return main() or EXIT_OK
    except BrokenPipeError:  # `| head` has seen enough; Python's own last flush would complain once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except Exception as error:
        line = as_line(error)
        if line is None:
            raise
        code = EXIT_NON_FINITE if isinstance(line, NonFiniteError) else EXIT_USER
        if not line.said:
            _let_others_speak_first(code)
            say(line)
        return code


def unwind_on_sigterm() -> None:
    """Let SIGTERM end this process as an exception does, with 143 as shells say: what is half-written is removed. The scripts send
    it for Ctrl-C, and a batch system at the time limit. A second one ends the process at once."""
    owner = os.getpid()

    def end(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != owner:  # a process that was forked from this one ends as it would
            os.kill(os.getpid(), number)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def as_line(error: Exception) -> UserError | NonFiniteError | None:
    """The error whose message is the one line for the user; None where `error` is a defect."""
    if isinstance(error, UserError | NonFiniteError):
        return error
    if isinstance(error, OSError) and (error.errno in DISK_FULL or (error.errno == errno.EROFS and error.filename is None)):
        where = f"{error.filename}: " if error.filename is not None else ""
        return UserError(f"the output needs space that can be written: {where}{error.strerror}; free some, or give another path")
    if isinstance(error, OSError) and error.filename is not None:  # about a path that the user could mend
        return UserError(f"cannot use {error.filename}: {error.strerror}; check the path and its permissions")
    if isinstance(error, RuntimeError) and str(error).startswith(_AUTOLOAD):
        what = str(error).partition(". ")[0]
        return UserError(f"{what} ({_first(error)}); source CANN's set_env.sh, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to run without it")
    return None


def _first(error: BaseException) -> str:
    """The error that a chain began with."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def say(error: Exception) -> None:
    """Print the one line."""
    print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)


def _let_others_speak_first(code: int) -> None:
    """Before the ranks have met, they all find the same wrong flag: the first rank of a machine says it, and torchrun
    then ends the others. One that is not ended has found something else, and says it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(OTHERS_SPEAK_FIRST)
