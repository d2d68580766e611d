"""--profile-steps: where a step's time goes (data, trunk, DSA layers, head, gradient sums, optimizer, other), and a trace.

Hooks switch one clock from part to part as a step passes them, forward and backward, so that the parts add up to the step. Between
steps it stands still, for evaluations and saves pass the same hooks.
The frozen trunk has no backward pass; the head's ends when the gradient of what the layers put out is there, and what follows
is the DSA layers'.
"""

import errno
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_patch.devices.device import Device
from megatron_patch.io.publish import atomic_write_text
from megatron_patch.model.layer_pattern import DSA
from megatron_patch.training.step import TrainStep

PARTS = ("data", "trunk", "DSA layers", "head and loss", "gradient sums", "optimizer", "other")
DATA, TRUNK, DSA_LAYERS, HEAD, GRADIENTS, OPTIMIZER, OTHER = PARTS


class StepClock:
    """Seconds by part, added up while it runs; a torch.profiler trace shows the parts as ranges.

    Args:
        device: waited for at each switch, so that a part is charged with its own work.
    """

    def __init__(self, device: Device):
        self._device = device
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._part: str | None = None
        self._since = 0.0
        self._range: torch.profiler.record_function | None = None

    def switch(self, part: str | None) -> None:
        """Charge the time since the last switch to the part that ends, and begin another; None stops the clock."""
        self._device.synchronize()
        now = time.perf_counter()
        if self._part is not None:
            self.seconds[self._part] += now - self._since
            self._range.__exit__(None, None, None)
        self._part, self._since = part, now
        if part is not None:
            self._range = torch.profiler.record_function(f"step: {part}")
            self._range.__enter__()

    def _reach(self, part: str) -> None:
        """`switch`, from a hook, where a step is being timed."""
        if self._part is not None:
            self.switch(part)

    def follow(self, step: TrainStep, pattern: tuple[str, ...], until: ExitStack) -> None:
        """Switch as a step goes on; `until` takes the hooks off again."""
        model = step.model.module
        hooks = [
            model.register_forward_pre_hook(lambda *_: self._reach(TRUNK)),
            model.decoder.final_layernorm.register_forward_pre_hook(self._enter_head),
            model.register_forward_hook(self._leave_forward),
        ]
        if DSA in pattern:
            lowest = model.decoder.layers[pattern.index(DSA)]
            hooks.append(lowest.register_forward_pre_hook(lambda *_: self._reach(DSA_LAYERS)))
        for hook in hooks:
            until.callback(hook.remove)
        if step.trunk is not None:
            self._time_calls(step.trunk, "output", TRUNK, until)
        self._time_calls(model.config, "finalize_model_grads_func", GRADIENTS, until)
        self._time_calls(step.optimizer, "step", OPTIMIZER, until)

    def _enter_head(self, _module, inputs: tuple[Tensor, ...]) -> None:
        self._reach(HEAD)
        self._head_has_backward = inputs[0].requires_grad
        if self._head_has_backward:
            inputs[0].register_hook(lambda _gradient: self._reach(DSA_LAYERS))

    def _leave_forward(self, *_) -> None:
        if not self._head_has_backward:  # beside a base's layers, the indexers alone have one
            self._reach(DSA_LAYERS)

    def _time_calls(self, holder: object, name: str, part: str, until: ExitStack) -> None:
        """Charge the calls of `holder.name` to a part, and what follows to `other`."""
        function = getattr(holder, name)
        own = name in vars(holder)

        def timed(*args, **kwargs):
            self._reach(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._reach(OTHER)

        setattr(holder, name, timed)
        until.callback(lambda: setattr(holder, name, function) if own else delattr(holder, name))


class StepProfile:
    """The steps first to last of a run on this rank, both included; `steps` None: none, and every call does nothing.

    Writes `profile_A_B.json` (seconds a step by part) and `trace_A_B.json` to `save`, and prints the table.
    The trace costs time itself, most where a step is made of many small operations.
    """

    def __init__(self, steps: tuple[int, int] | None, step: TrainStep, pattern: tuple[str, ...], save: Path):
        self._steps, self._step, self._pattern, self._save = steps, step, pattern, save
        self._taken = 0
        self._clock = StepClock(step.device)
        self._hooks = ExitStack()
        self._trace: torch.profiler.profile | None = None

    def begin(self, iteration: int) -> None:
        """Before the data of step `iteration` (1-based) is fetched."""
        if self._steps is None or not self._steps[0] <= iteration <= self._steps[1]:
            return
        if self._trace is None:
            self._clock.follow(self._step, self._pattern, self._hooks)
            self._trace = torch.profiler.profile()
            self._trace.start()
        self._clock.switch(DATA)

    def data_is_there(self) -> None:
        if self._trace is not None:
            self._clock.switch(OTHER)

    def end(self, iteration: int) -> None:
        """After step `iteration`."""
        if self._trace is None:
            return
        self._clock.switch(None)
        self._taken += 1
        if iteration == self._steps[1]:
            self._finish()

    def __enter__(self) -> "StepProfile":
        return self

    def __exit__(self, failure: type | None, *_) -> None:
        """A run that stops before the last of the steps reports those that it took."""
        if self._trace is not None and failure is None and self._taken:
            self._finish()
        elif self._trace is not None:
            self._trace.stop()
        self._hooks.close()

    def _finish(self) -> None:
        self._trace.stop()
        name = f"{self._steps[0]}_{self._steps[1]}.json"
        seconds = {part: value / self._taken for part, value in self._clock.seconds.items()}
        content = json.dumps({"steps": self._taken, "seconds": seconds}, indent=2) + "\n"
        _write(self._save / f"profile_{name}", lambda path: atomic_write_text(path, content))
        _write(self._save / f"trace_{name}", lambda path: self._trace.export_chrome_trace(str(path)))
        self._trace, self._steps = None, None
        self._hooks.close()
        tqdm.write(f"where a step's time goes, mean of {self._taken} steps, with the trace's own cost:\n{breakdown(seconds)}")


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file of the profile, beside its place first; a full disk costs the file, not the run."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial)
        if not partial.exists():  # torch's exporter has no errors: where it fails, it leaves its .tmp, and no trace
            raise OSError(errno.EIO, "torch's exporter did not finish it, as on a full disk")
        partial.replace(path)
    except OSError as error:
        tqdm.write(f"note: {path} could not be written: {error.strerror}", file=sys.stderr)
    finally:
        for left in (partial, partial.with_name(f"{partial.name}.tmp")):
            left.unlink(missing_ok=True)


def breakdown(seconds: dict[str, float]) -> str:
    """A table of one step's parts."""
    total = sum(seconds.values())
    rows = [*seconds.items(), ("a step", total)]
    return "\n".join(f"  {part:<14} {value:9.4f} s {value / total:6.1%}" for part, value in rows)
