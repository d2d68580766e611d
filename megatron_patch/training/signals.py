"""Stop cleanly on a signal or a time limit: finish the step, save, leave with exit code 0."""

import signal
import time

from megatron_patch.devices import ranks
from megatron_patch.devices.device import Device

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_TIME = 1000  # beside the signals' numbers


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

    def reason(self, device: Device) -> str | None:
        """Why to stop, the same on all ranks, which call this together; None: go on.

        A rank that stopped alone would leave the others in a collective, and a signal or a clock reaches them apart.
        """
        code = 0 if self._received is None else int(self._received)
        if code == 0 and self._deadline is not None and time.monotonic() >= self._deadline:
            code = _TIME
        code = int(ranks.highest(code, device.sums_device))
        if code == _TIME:
            return "--exit-duration-in-mins is over"
        return f"received {signal.Signals(code).name}" if code else None

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
