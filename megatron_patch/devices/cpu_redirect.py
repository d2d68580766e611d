"""Send what megatron-core asks of `torch.cuda` to the CPU.

megatron-core 0.16.1 names the device "cuda" in its embeddings, router, optimizer and schedules, and has no other
switch. This redirect is the mirror image of `torch_npu.contrib.transfer_to_npu`: it is installed once, before the
first import of `megatron.core`, only where the device is the CPU, and never where CUDA or an NPU is used.

Everything replaced here is listed in `install`; each replacement is what the call means on a machine whose only
device is the CPU. Nothing answers "there is a GPU": `torch.cuda.is_available()` stays as it is, False.
"""

import contextlib
import functools
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")
_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
    "rand",
    "randn",
)
_installed = False


class Stream:
    """A stream of a device that runs everything in order: there is nothing to wait for."""

    def __init__(self, *args, **kwargs): ...

    def wait_stream(self, stream): ...

    def wait_event(self, event): ...

    def synchronize(self): ...

    def record_event(self, event=None):
        return event or Event()

    def query(self) -> bool:
        return True


class Event:
    """An event that has happened by the time it is asked about."""

    def __init__(self, *args, **kwargs): ...

    def record(self, *args): ...

    def wait(self, *args): ...

    def synchronize(self): ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        return 0.0


def install() -> None:
    """Install the redirect; a second call does nothing.

    Raises:
        RuntimeError: megatron.core was imported before, so that parts of it hold the originals; or CUDA is available,
            where the redirect would silently move work off the GPU that another library uses.
    """
    global _installed
    if _installed:
        return
    if any(name == "megatron.core" or name.startswith("megatron.core.") for name in sys.modules):
        raise RuntimeError("the CPU redirect must be installed before megatron.core is imported")
    _redirect_factories()
    _redirect_tensor_methods()
    _redirect_cuda_module()
    _redirect_all_reduce()
    _installed = True


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _redirect_factories() -> None:
    """`torch.empty(..., device="cuda")`, as in schedules, clip_grads, optimizer and utils."""
    # `with torch.device("meta")` recognises factories by identity, in a set that is cached at first use: it must hold
    # the originals, which the wrappers call. Otherwise the context is ignored in silence.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def create(*args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def _redirect_tensor_methods() -> None:
    tensor = torch.Tensor
    original_to, original_type = tensor.to, tensor.type

    def to(self, *args, **kwargs):
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original_to(self, *args, **kwargs)

    def type_(self, dtype=None, *args, **kwargs):
        # The optimizer sorts parameters by names such as "torch.cuda.FloatTensor"; only it may see that name.
        if dtype is not None:
            return original_type(self, dtype, *args, **kwargs)
        name = original_type(self)
        asked_by_optimizer = "megatron/core/optimizer" in sys._getframe(1).f_code.co_filename
        return name.replace("torch.", "torch.cuda.", 1) if asked_by_optimizer else name

    tensor.to, tensor.type = to, type_
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _redirect_cuda_module() -> None:
    cuda, stream = torch.cuda, Stream()
    cuda.Stream, cuda.Event = Stream, Event
    answers: dict[str, Callable] = {
        "current_device": lambda: CPU,
        "current_stream": lambda *_, **__: stream,
        "default_stream": lambda *_, **__: stream,
        "synchronize": lambda *_, **__: None,
        "empty_cache": lambda *_, **__: None,
        "set_device": lambda *_, **__: None,
        "stream": lambda *_, **__: contextlib.nullcontext(),
        "device": lambda *_, **__: contextlib.nullcontext(),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "memory_allocated": lambda *_, **__: 0,
        "max_memory_allocated": lambda *_, **__: 0,
        "memory_reserved": lambda *_, **__: 0,
        "memory_stats": lambda *_, **__: {},
    }
    # One function object per name: torch._dynamo, which megatron-core's jit_fuser imports, refuses shared ones.
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.nvtx.range_push = lambda *_, **__: None
    cuda.nvtx.range_pop = lambda *_, **__: None


def _redirect_all_reduce() -> None:
    """gloo has no ReduceOp.AVG (used for gradients and metrics): sum, then divide."""
    original = dist.all_reduce

    @functools.wraps(original)
    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if op != dist.ReduceOp.AVG:
            return original(tensor, op=op, group=group, async_op=async_op)
        if async_op:
            # The division must follow the sum; nobody in 0.16.1 asks for this, and a wrong mean would be silent.
            raise RuntimeError("asynchronous ReduceOp.AVG is not available on gloo; use SUM and divide")
        original(tensor, op=dist.ReduceOp.SUM, group=group)
        tensor.div_(dist.get_world_size(group))
        return None

    dist.all_reduce = all_reduce
