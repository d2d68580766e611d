"""`dsa-upcycle doctor` and `dsa-upcycle plan`: what a machine has, and whether a model fits it."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_patch.model.architecture import DsaSettings
from megatron_patch.planning.layout import PlanParallel


@contextlib.contextmanager
def _torch_alone() -> Iterator[None]:
    """torch imports its backends with itself, and a torch_npu without its CANN ends the process: here that is an answer."""
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


@dataclass
class Doctor:
    """What this machine has, what a run would use, and what is missing.

    Versions, devices, variables of HCCL; on an NPU it also loads MindSpeed in a process of its own. What is missing is an answer: the exit
    code is 0.

    Example: dsa-upcycle doctor --json doctor.json
    """

    json: Path | None = None
    """Also write the result to this file."""

    def __call__(self) -> int | None:
        with _torch_alone():
            from megatron_patch.diagnosis.doctor import run

        return run(self.json)


@dataclass
class Plan:
    """Parameters, bytes per device, communication and time of a layout; recommends one.

    Will it fit? The answer comes before a device is booked.

    Reads config.json only: of a base to upcycle, or of a whole DeepSeek-V3.2, pruned or not. Activations and time are estimates;
    docs/plan.md gives the formulas.

    Example: dsa-upcycle plan --base DeepSeek-V2-Lite-Chat --devices 8 --device-memory-gb 64 --bf16
    """

    base: Path
    """The base's Hugging Face directory, or a config.json."""
    dsa_layers: int = 2
    """DSA layers appended on top of the base."""
    layer_pattern: str | None = None
    """The whole pattern instead of --dsa-layers, e.g. mla*27,dsa*2."""
    dsa: DsaSettings = field(default_factory=DsaSettings)
    parallel: PlanParallel = field(default_factory=PlanParallel)
    devices: int = 1
    """Devices in all."""
    device_memory_gb: float | None = None
    """Memory of a device, in units of 1e9 bytes; without it nothing is said about fitting."""
    seq_length: int = 4096
    """Tokens of a sample."""
    micro_batch_size: int = 1
    """Samples a rank takes through the model at once."""
    global_batch_size: int = 64
    """Samples of a step, over all ranks."""
    recompute_dsa: bool = False
    """Layers that train keep their inputs only."""
    tflops: float | None = None
    """TFLOP/s that a device reaches in matrix products; with --bandwidth-gb it gives the time of a step."""
    bandwidth_gb: float | None = None
    """GB/s (1e9 bytes) that a device sends to others."""
    bf16: bool = True
    """Parameters and activations in bfloat16, fp32 main weights and gradients. Off: fp32 throughout."""
    json: Path | None = None
    """Also write the plan to this file."""

    def __call__(self) -> int | None:
        from megatron_patch.planning.report import run

        return run(
            self.base,
            dsa_layers=self.dsa_layers,
            layer_pattern=self.layer_pattern,
            dsa=self.dsa,
            parallel=self.parallel,
            devices=self.devices,
            device_memory_gb=self.device_memory_gb,
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.global_batch_size,
            recompute_dsa=self.recompute_dsa,
            tflops=self.tflops,
            bandwidth_gb=self.bandwidth_gb,
            bf16=self.bf16,
            json_file=self.json,
        )
