"""Write a safetensors file tensor by tensor, through Python's own files.

safetensors' `save_file` wants every tensor on the CPU at once, and reports a full disk as an error of its own without
a number; here a tensor at a time leaves its device, and the system's `OSError` stays what it is.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
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
    return write_stream(path, [(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()], tensors.values())


def write_stream(
    path: str | Path, header: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], tensors: Iterable[Tensor]
) -> str:
    """As `write_safetensors`, of tensors that are made one by one.

    Args:
        header: (name, dtype, shape) of each.
        tensors: in the header's order.

    Raises:
        ValueError: they are not those of the header; the file is of no use.
    """
    rows = [(name, _CODES[dtype], shape, math.prod(shape) * dtype.itemsize) for name, dtype, shape in header]
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def write(data) -> None:
            digest.update(data)
            file.write(data)

        write(header_bytes(rows, {"format": "pt"}))
        for (name, dtype, shape), tensor in zip(header, tensors, strict=True):
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, the header says {dtype} {shape}")
            flat = tensor.detach().cpu().contiguous().flatten()
            if flat.numel():
                write(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
