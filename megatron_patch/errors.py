"""How a run ends badly: one line for the user, one exit code that scripts can rely on."""

import os
import sys
from collections.abc import Callable

EXIT_OK = 0
EXIT_INTERNAL = 1
EXIT_USER = 2
EXIT_NON_FINITE = 3


class UserError(ValueError):
    """The user's input breaks a rule. The message is one line: the rule, the value, the remedy."""


class NonFiniteError(RuntimeError):
    """Loss or gradients were not finite too many steps in a row."""


def run(main: Callable[[], int | None]) -> int:
    """Call `main` and translate its end into an exit code.

    Returns:
        What `main` returned (None is 0), 2 after a `UserError` or a path that the system refuses, 3 after a
        `NonFiniteError`; these print one line on stderr and no traceback. 0 where the reader of the output has left. Any other exception passes through: it is a defect of ours and its traceback helps.
    """
    try:
        return main() or EXIT_OK
    except UserError as error:
        return _say(error, EXIT_USER)
    except NonFiniteError as error:
        return _say(error, EXIT_NON_FINITE)
    except BrokenPipeError:  # `| head` has seen enough; Python's own last flush would complain once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        if error.filename is None:  # not about a path that the user could mend
            raise
        return _say(UserError(f"cannot use {error.filename}: {error.strerror}; check the path and its permissions"), EXIT_USER)


def _say(error: Exception, code: int) -> int:
    print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
    return code
