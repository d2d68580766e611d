"""A CPU as one of verl's platforms, through the registry that verl has for other vendors' devices.

Imported before anything that asks verl for its device. The engines are those that verl registers for CUDA.
"""

import contextlib
import os
import types

os.environ |= {
    "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
}  # fmt: skip

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Index(str):
    """The current device: as a device it is "cpu", within f"cpu:{...}" the 0."""

    def __format__(self, spec: str) -> str:
        return "0"


def _device_module() -> types.SimpleNamespace:
    """torch.cpu and the questions about memory that verl asks of an accelerator."""
    module = types.SimpleNamespace(**{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if name[0] != "_"})
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved", "empty_cache"):
        setattr(module, name, lambda *_: 0)
    module.mem_get_info = lambda *_: (0, 0)
    module.get_device_name = lambda *_: "cpu"
    module.manual_seed, module.get_rng_state, module.set_rng_state = (
        torch.manual_seed,
        torch.get_rng_state,
        torch.set_rng_state,
    )
    return module


@PlatformRegistry.register("cpu")
class PlatformCPU(PlatformBase):
    device_name, vendor_name, device_module = "cpu", "none", _device_module()

    def is_available(self):
        return True

    def current_device(self):
        return _Index("cpu")

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return contextlib.nullcontext()

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def _nothing(self, *_):
        return None

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing
