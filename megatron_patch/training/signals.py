"""Stop cleanly on a signal or a time limit: finish the step, save, leave with exit code 0."""

import signal
import time

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Says between steps whether, and why, the run shall stop.

    Args:
        minutes: time limit from now on; None: none.
    """

    def __init__(self, minutes: float | None):
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._received: signal.Signals | None = None
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}

    def _handle(self, number: int, frame) -> None:
        if self._received is not None:  # asked twice: the user does not want to wait for the step
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._received = signal.Signals(number)

    @property
    def reason(self) -> str | None:
        """Why to stop; None: go on."""
        if self._received is not None:
            return f"received {self._received.name}"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "--exit-duration-in-mins is over"
        return None

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
