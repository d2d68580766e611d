"""Write a safetensors file tensor by tensor, through Python's own files.

safetensors' `save_file` wants every tensor on the CPU at once, and reports a full disk as an error of its own without
a number; here a tensor at a time leaves its device, and the system's `OSError` stays what it is.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_patch.io.raw_safetensors import header_bytes
from megatron_patch.io.safetensors_dir import DTYPES

_CODES = {dtype: code for code, dtype in DTYPES.items()}


def write_safetensors(path: str | Path, tensors: Mapping[str, Tensor]) -> str:
    """Write `tensors` (any device, any stride) in their order; returns the SHA-256 of what was meant to be written.

    Raises:
        OSError: the disk is full, and so on.
        KeyError: a dtype that the format lacks.
    """
    rows = [(name, _CODES[t.dtype], tuple(t.shape), t.numel() * t.element_size()) for name, t in tensors.items()]
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def write(data) -> None:
            digest.update(data)
            file.write(data)

        write(header_bytes(rows, {"format": "pt"}))
        for tensor in tensors.values():
            flat = tensor.detach().cpu().contiguous().flatten()
            if flat.numel():
                write(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
