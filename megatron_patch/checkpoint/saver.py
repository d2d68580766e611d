"""The checkpoints of a run, one after another: written while the run waits, or (`--async-save`) by a thread of each rank.

Files are written and hashed without Python's lock, so that training goes on beside them. Everything that ranks do together
stays on the main thread, at a step's boundary: torch.distributed wants one order of collectives.
"""

import threading
from collections.abc import Callable

import torch

from megatron_patch.checkpoint.save import Snapshot, Writing
from megatron_patch.devices import ranks


class Saver:
    """Saves snapshots; leaving its context with one that is not published removes that one. All ranks call it alike.

    Args:
        keep_last: checkpoints to keep, the oldest go; 0 keeps all.
    """

    def __init__(self, keep_last: int):
        self.keep_last = keep_last
        self._pending: Writing | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *error) -> None:
        if self._pending is not None:  # the run has failed, and its ranks may not be there to publish together
            self._written().abandon()

    def save(self, snapshot: Snapshot, check: Callable[[], None] | None = None, *, background: bool) -> None:
        """Write and publish a snapshot, or begin to (`background`); one that is being written is finished first.

        Args:
            snapshot: with `background`, a copy.
            check: as `Writing`'s.
        """
        self.finish()
        self._pending = Writing(snapshot, self.keep_last, check)
        if background:
            self._thread = threading.Thread(target=self._pending.write, name="checkpoint")
            self._thread.start()
        else:
            self._pending.write()
            self.finish()

    def publish_if_written(self, device: torch.device) -> None:
        """At a step's boundary: publish if every rank has written. Costs one number's reduction while one has not.

        Args:
            device: for the reduction.
        """
        if self._pending is not None and not ranks.highest(self._thread.is_alive(), device):
            self.finish()

    def finish(self) -> None:
        """Wait for every rank's writer and publish; nothing, where nothing is being written.

        Raises:
            Exception: what a writer failed with.
        """
        if self._pending is not None:
            self._written().publish()

    def _written(self) -> Writing:
        """What was pending, this rank's part being written."""
        if self._thread is not None:
            self._thread.join()
        writing, self._pending, self._thread = self._pending, None, None
        return writing
