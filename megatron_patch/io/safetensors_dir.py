"""Read safetensors one tensor at a time: a single file, or a Hugging Face directory (one file, or shards and an index).

Only safetensors are ever read: a pickled `pytorch_model.bin` may run code when it is opened.
"""

import io
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_patch.errors import UserError
from megatron_patch.io.raw_safetensors import RawFile
from megatron_patch.io.strict_json import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsFile:
    """One safetensors file; opening it reads the header, and that the file is as long as the header says.

    Raises:
        UserError: the file is missing, empty, truncated or no safetensors file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"a safetensors file must exist: {self.path} does not; download or copy it again")
        try:
            self._handle = safe_open(self.path, framework="pt")
        except SafetensorError as error:
            raise UserError(
                f"a safetensors file must be whole: {self.path} ({self.path.stat().st_size} bytes): {error}; "
                "it is truncated or damaged, download or copy it again"
            ) from None
        self._raw = RawFile(self.path)
        self.names: tuple[str, ...] = tuple(self._raw.tensors)  # in the file's order: sequential reads

    def shape(self, name: str) -> tuple[int, ...]:
        return self._raw.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        code = self._raw.tensors[name].dtype
        if code not in DTYPES:
            raise UserError(f"dtype must be one of {', '.join(DTYPES)}: {name} in {self.path} has {code}; convert it")
        return DTYPES[code]

    def nbytes(self, name: str) -> int:
        """Size of the tensor's data in bytes."""
        return self._raw.tensors[name].nbytes

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU, in the dtype of the file.

        Read into memory of its own: safetensors would map the file, whose pages then count for the process as long as it is
        open, and a whole model twice.
        """
        where, shape = self._raw.tensors[name], self.shape(name)
        data = torch.empty(where.nbytes, dtype=torch.uint8)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(where.start)
            _read_into(file, data.numpy().data)
        return data.view(self.dtype(name)).view(shape)

    def load_part(self, name: str, begin: int, end: int) -> Tensor:
        """Entries `begin` to `end` of the first dimension; only they are read."""
        return self._handle.get_slice(name)[begin:end]


class SafetensorsDir:
    """The tensors of a Hugging Face directory, checked against the index when opened and read one at a time.

    Symbolic links are followed (the Hugging Face cache is made of them), but a file name in the index must be a plain
    name: it cannot lead out of the directory.

    Attributes:
        path: the directory.
        names: every tensor, shard by shard in the order of the files' data.
        files: the files that hold them, by plain name.
        metadata: the index's `metadata` object; empty for a single file.

    Raises:
        UserError: no safetensors, a missing or truncated shard, an index that is no index, or that disagrees with
            its shards.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        index = self.path / INDEX_FILE
        single = self.path / SINGLE_FILE
        if index.is_file() and single.is_file():
            raise UserError(
                f"weights must be {SINGLE_FILE} or shards with {INDEX_FILE}: {self.path} has both, and readers differ "
                "in which they take; remove one"
            )
        self.metadata: dict = {}
        if index.is_file():
            weight_map = self._read_index(index)
            files = tuple(dict.fromkeys(weight_map.values()))
        elif single.is_file():
            weight_map, files = None, (SINGLE_FILE,)
        else:
            raise UserError(_nothing_to_read(self.path))
        self._shards = {file: SafetensorsFile(self.path / file) for file in files}
        self._file_of = {name: file for file in files for name in self._shards[file].names}
        if weight_map is not None:
            self._check_index(weight_map)
        self.names = tuple(self._file_of)
        self.files = files

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            content = read_json(index)
            weight_map, metadata = content["weight_map"], content.get("metadata", {})
            if not isinstance(weight_map, dict) or not weight_map or not isinstance(metadata, dict):
                raise TypeError("weight_map must be a filled object, metadata an object")
        except (ValueError, KeyError, TypeError) as error:
            detail = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"an index maps tensors to files: {index}: {detail}; download or copy it again") from None
        for name, file in weight_map.items():
            if not isinstance(file, str) or not _is_plain_name(file):
                raise UserError(
                    f"an index may name only safetensors files of its own directory: {index} has {name} in {file!r}; "
                    "do not use a checkpoint from a source that you do not trust"
                )
        self.metadata = metadata
        return weight_map

    def _check_index(self, weight_map: dict[str, str]) -> None:
        held = {(name, file) for file, shard in self._shards.items() for name in shard.names}
        said = set(weight_map.items())
        for rule, pairs in (
            ("every tensor of the index must be in its shard", said - held),
            ("every tensor of a shard must be in the index, once", held - said),
        ):
            if pairs:
                name, file = min(pairs)
                raise UserError(
                    f"{rule}: {len(pairs)} are not, the first is {name} of {file} in {self.path}; "
                    "the files are of different downloads, get them again"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def file_of(self, name: str) -> str:
        """Plain name of the file that holds the tensor."""
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shards[self._file_of[name]].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._shards[self._file_of[name]].dtype(name)

    def nbytes(self, name: str) -> int:
        """Size of the tensor's data in bytes."""
        return self._shards[self._file_of[name]].nbytes(name)

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU, in the dtype of the file."""
        return self._shards[self._file_of[name]].load(name)


def _read_into(file: io.FileIO, memory: memoryview) -> None:
    while memory:
        count = file.readinto(memory)  # at most 2 GB at a time
        if not count:
            raise OSError(f"{file.name} ended while it was read")
        memory = memory[count:]


def _is_plain_name(file: str) -> bool:
    return file.endswith(".safetensors") and not any(c in file for c in "/\\\0") and not file.startswith(".")


def _nothing_to_read(path: Path) -> str:
    if not path.is_dir():
        return f"weights are read from a directory: {path} is none; give the directory that holds the safetensors files"
    pickles = sorted(file.name for ending in ("*.bin", "*.pt", "*.pth") for file in path.glob(ending))
    if pickles:
        return (
            f"only safetensors are read, for pickled weights can run code: {path} has {pickles[0]}; download the "
            "safetensors files, or convert with transformers' save_pretrained where you trust the source"
        )
    shards = len(list(path.glob("*.safetensors")))
    if shards:
        return f"shards need their index: {path} has {shards} safetensors files and no {INDEX_FILE}; download it too"
    return f"a model directory must hold {SINGLE_FILE} or shards with {INDEX_FILE}: {path} has neither; download them"
