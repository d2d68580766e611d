"""Identities: of a file, of a tensor, and of the model that a directory holds."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_patch.io.safetensors_dir import INDEX_FILE, SafetensorsDir

_CHUNK = 1 << 20


def file_sha256(path: str | Path, progress: Callable[[int], object] | None = None) -> str:
    """SHA-256 of a file, hex; `progress` is called with the number of bytes after each piece."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))  # used again: fresh memory costs as much as the hash
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if progress is not None:
                progress(count)
    return digest.hexdigest()


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes, hex: equal exactly for bit-identical tensors, NaN included."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def model_file_hashes(
    directory: str | Path, *, progress: bool = False, known: Mapping[str, tuple[int, str]] | None = None
) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file that makes a model what it is: config.json, the index, the weights it names.

    Args:
        directory: a Hugging Face directory.
        progress: show a bar over the bytes on stderr.
        known: sizes and hashes of some of the files, which are not read.

    Raises:
        UserError: the weights are missing, truncated or not safetensors.
    """
    directory, known = Path(directory), known or {}
    extra = [name for name in ("config.json", INDEX_FILE) if (directory / name).is_file()]
    names = {*extra, *SafetensorsDir(directory).files} - known.keys()
    sizes = {name: (directory / name).stat().st_size for name in names}
    label = f"hash {directory.name}"
    with tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, desc=label, disable=not progress) as bar:
        found = {name: (size, file_sha256(directory / name, bar.update)) for name, size in sorted(sizes.items())}
    return dict(sorted((found | dict(known)).items()))


def identity_of(hashes: Mapping[str, tuple[int, str]]) -> str:
    """One SHA-256 for what `model_file_hashes` returned."""
    lines = "".join(f"{name} {size} {sha256}\n" for name, (size, sha256) in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def directory_identity(directory: str | Path, *, progress: bool = False) -> str:
    """The identity of the model in a Hugging Face directory, hex: changes with any byte of its config or weights.

    Tokenizer, README and other files do not count. Reads every byte: one to two seconds per gigabyte.
    """
    return identity_of(model_file_hashes(directory, progress=progress))
