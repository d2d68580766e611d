"""One writer at a time: a lock on a directory that ends with the process that holds it, however it ends."""

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_patch.errors import UserError


@contextlib.contextmanager
def only_writer(directory: Path, flag: str, wait: bool = False) -> Iterator[None]:
    """Hold `directory`, made if it is not there, against other processes of this kind.

    No file is written, and nothing is left to clear away after a kill. A file system without locks holds nothing, and is named on stderr.

    Args:
        flag: that named the directory, for the message.
        wait: until another process lets go, instead of the refusal.

    Raises:
        UserError: another process holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UserError(
                f"one run at a time writes to {flag}: {directory} is in use by another process; wait for it, end it, or give "
                "another path"
            ) from None
        except OSError as error:
            print(
                f"note: {directory} is on a file system without locks ({error}): two runs that write there would not notice each other",
                file=sys.stderr,
                flush=True,
            )
        yield
    finally:
        os.close(descriptor)
