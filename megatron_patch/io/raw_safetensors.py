"""safetensors as bytes: where each tensor lies in its file, and headers to write. No dtype needs to be known to torch.

FP8 scales (`F8_E8M0`), packed FP4 and whatever comes next are moved without being interpreted.
Format: https://github.com/huggingface/safetensors#format
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.errors import UserError
from megatron_patch.io.strict_json import parse_json

_LENGTH = 8
_ALIGN = 8
_LARGEST_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class RawTensor:
    """A tensor in a file: `nbytes` bytes from `start`, counted from the file's beginning; `dtype` is the file's code."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class RawFile:
    """The header of a safetensors file.

    Attributes:
        path: the file.
        header: the header's JSON as it stands in the file, padding included.
        tensors: by name, in the order of the data.
        metadata: the file's `__metadata__`; None without.

    Raises:
        UserError: the file is missing, is no safetensors file, or is shorter or longer than its header says.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"a safetensors file must exist: {self.path} does not; download or copy it again")
        size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            if size < _LENGTH or length > min(size - _LENGTH, _LARGEST_HEADER):
                raise _damaged(self.path, size, "its header is cut off")
            self.header = file.read(length)
        try:
            content = parse_json(self.header.decode())  # a name that stands twice would hide a tensor
            self.metadata: dict | None = content.pop("__metadata__", None)
            found = [self._tensor(name, entry, _LENGTH + length) for name, entry in content.items()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(self.path, size, f"its header is no table of tensors ({error!r})") from None
        found.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
        end = _LENGTH + length
        for tensor in found:
            if tensor.start != end or tensor.nbytes < 0:
                raise _damaged(self.path, size, f"{tensor.name} does not follow the tensor before it")
            end += tensor.nbytes
        if end != size:
            raise _damaged(self.path, size, f"its header says {end} bytes")
        self.tensors = {tensor.name: tensor for tensor in found}

    @staticmethod
    def _tensor(name: str, entry: dict, base: int) -> RawTensor:
        begin, end = entry["data_offsets"]
        return RawTensor(name, entry["dtype"], tuple(entry["shape"]), base + begin, end - begin)


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: dict | None) -> bytes:
    """Length and header of a safetensors file.

    Args:
        tensors: (name, dtype code, shape, bytes) in the order of the data, which follows the header without gaps.
        metadata: `__metadata__`, or None.
    """
    content: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(_LENGTH, "little") + text


def _damaged(path: Path, size: int, detail: str) -> UserError:
    return UserError(
        f"a safetensors file must be whole: {path} ({size} bytes): {detail}; it is truncated or damaged, "
        "download or copy it again"
    )
