"""Choose a device and make torch.distributed and megatron-core run on it.

`activate` comes before any import of `megatron.core`. On the CPU it installs `cpu_redirect`, on NPUs MindSpeed; on CUDA
nothing of either.
"""

import os
import resource
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_patch.devices import cpu_redirect, mcore_fixes, npu
from megatron_patch.errors import UserError


@dataclass(frozen=True)
class Device:
    """An activated device: its name (cpu, cuda or npu), where tensors live, and the torch.distributed backend."""

    name: str
    torch_device: torch.device
    backend: str

    def peak_memory_mb(self) -> float:
        """Peak so far, MiB: resident memory of the process on the CPU, allocated by torch on CUDA and NPU."""
        if self.name == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return getattr(torch, self.name).max_memory_allocated(self.torch_device) / 2**20

    @property
    def sums_device(self) -> torch.device:
        """Where numbers lie that are added up over ranks in fp64: on the CPU beside NPUs, since HCCL adds up no fp64."""
        return torch.device("cpu") if self.name == "npu" else self.torch_device

    def synchronize(self) -> None:
        """Wait until queued work is done, so that a clock read afterwards is honest."""
        if self.name != "cpu":
            getattr(torch, self.name).synchronize(self.torch_device)

    def make_current(self) -> None:
        """For a thread that this process starts: accelerators keep a current device for each thread, CANN none at first."""
        if self.name != "cpu":
            getattr(torch, self.name).set_device(self.torch_device)


def activate(name: str | None = None) -> Device:
    """Activate `name` ("cpu", "cuda", "npu"; None: what is there) and mend megatron-core for it.

    Raises:
        UserError: the device is not there, or what drives it; or megatron-core has another version.
    """
    mcore_fixes.check_version()
    name = name or default_name()
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda needs a GPU that torch can use: torch.cuda.is_available() is False; use --device cpu"
        )
    # One pure-Python extension of megatron-core warns at import about each optional package that is absent.
    warnings.filterwarnings("ignore", module=r"megatron\.core.*")
    # It calls the collectives of its distributed optimizer by names that torch 2.13 has replaced.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    if name == "cpu":
        cpu_redirect.install()
        device = Device("cpu", torch.device("cpu"), "gloo")
    elif name == "npu":
        device = Device("npu", npu.activate(_local_rank()), npu.BACKEND)
    else:
        local_rank = _local_rank()
        torch.cuda.set_device(local_rank)
        device = Device("cuda", torch.device("cuda", local_rank), "nccl")
    mcore_fixes.apply(on_cpu=name == "cpu")
    return device


def default_name() -> str:
    """An NPU where there is one, else CUDA, else the CPU. NPUs first: their adaptor makes torch.cuda answer for them."""
    if npu.is_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def inference_device(name: str | None) -> torch.device:
    """Where a model runs that is transformers' alone, without megatron-core; None: what is there.

    Raises:
        UserError: no such device, or it is not there.
    """
    name = name or default_name()
    if name not in ("cpu", "cuda", "npu"):
        raise UserError(f"--device must be cpu, cuda or npu: {name!r}; choose one")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda needs a GPU that torch can use: there is none; use --device cpu")
    if name == "npu" and not npu.is_available():
        raise UserError("--device npu needs torch_npu and a device: there is none; use --device cpu")
    return torch.device(name)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def initialize_distributed(device: Device, seed: int, *, expert_parallel: int = 1, timeout_minutes: float = 30) -> None:
    """Start torch.distributed (torchrun's variables, or one process alone) and megatron-core's groups and RNG.

    Args:
        device: an activated device.
        seed: of megatron-core's RNG tracker; rank-dependent where it must be.
        expert_parallel: ranks over which the experts of a layer are spread.
        timeout_minutes: after which a collective whose partner died ends the process.

    Raises:
        RuntimeError: megatron-core's groups were made before, for another layout.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        timeout = timedelta(minutes=timeout_minutes)
        if "RANK" in os.environ:
            store, rank, count = _meeting_point(timeout)
            dist.init_process_group(device.backend, store=store, rank=rank, world_size=count, timeout=timeout)
        else:  # plain python: one process, which needs no port
            dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    if not parallel_state.model_parallel_is_initialized():
        if device.name == "npu":
            npu.repatch(expert_parallel=expert_parallel)
            mcore_fixes.apply(on_cpu=False)  # what MindSpeed took back and made anew may have undone a mend
        # Its groups have a time-out of their own: 30 minutes, whatever that of the processes is.
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=expert_parallel, distributed_timeout_minutes=timeout_minutes
        )
    if (found := parallel_state.get_expert_model_parallel_world_size()) != expert_parallel:
        raise RuntimeError(f"the groups are for {found} expert-parallel ranks, not {expert_parallel}")
    model_parallel_cuda_manual_seed(seed)


def _meeting_point(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """(store, rank, ranks) of torchrun's variables; the store holds nothing of an earlier start of this run.

    torchrun keeps one store over its restarts, and torch 2.13 takes it for a new one (rendezvous.py: "no need to add prefix for
    each attempt"): the ranks then wait for the addresses of those that died. The number of restarts is the same for all
    ranks on one machine only; on several, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes torchrun open a store each time.
    """
    store, rank, count = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = dist.PrefixStore(f"start{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store, rank, count


def shutdown_distributed() -> None:
    """Leave the groups; safe to call when nothing was started."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
