"""Stands for torch_npu: gives torch a device "npu" that can be named, and notes that it was loaded."""

import os
import types

import torch

from . import record

if os.environ.get("STAND_IN") == "breaks":
    raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")
__version__ = "2.10.0"
record.note("torch_npu")
torch.utils.rename_privateuse1_backend("npu")
torch.npu = types.SimpleNamespace(
    is_available=lambda: os.environ.get("STAND_IN") != "no_npu",
    device_count=lambda: 2,
    set_device=lambda index: record.note(f"set_device {index}"),
)
