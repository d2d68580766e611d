"""An optimizer's state on disk, in pieces of named parameters: any ranks can write it, any others read it.

A parameter of the whole model, flattened, has the entries 0 to n. A rank that holds the entries from `begin` on of a
state of it (`exp_avg`, `exp_avg_sq`, `momentum_buffer`, or `main`, the fp32 copy of a parameter in bf16) writes a
one-dimensional tensor `KEY/GLOBAL NAME/BEGIN`; a number for the whole parameter (AdamW's `step`) has no dimension. How
the state was cut, by a distributed optimizer or over experts, is then visible in the files, and a reader takes the
entries that it needs from whichever pieces hold them.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_patch.errors import UserError
from megatron_patch.io.safetensors_dir import SafetensorsFile

MAIN = "main"
_REMEDY = "copy the checkpoint again, use another iteration, or start from its weights with --pretrained-checkpoint"


def entry_name(key: str, parameter: str, begin: int) -> str:
    """The name of a piece in its file."""
    return f"{key}/{parameter}/{begin}"


class OptimizerState:
    """The pieces of all files of a checkpoint; opening it reads the headers.

    Raises:
        UserError: a file is not whole, or an entry has no such name.
    """

    def __init__(self, files: Sequence[Path]):
        self.directory = files[0].parent if files else None
        self._pieces: dict[tuple[str, str], list[tuple[int, int | None, SafetensorsFile, str]]] = {}
        for path in files:
            file = SafetensorsFile(path)
            for entry in file.names:
                key, _, rest = entry.partition("/")
                name, _, begin = rest.rpartition("/")
                if not (key and name and begin.isdigit()):
                    raise UserError(f"an optimizer's state has entries KEY/NAME/BEGIN: {path} has {entry!r}; {_REMEDY}")
                shape = file.shape(entry)
                end = int(begin) + shape[0] if shape else None
                self._pieces.setdefault((name, key), []).append((int(begin), end, file, entry))
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece[0])

    @property
    def parameters(self) -> set[str]:
        """Global names of the parameters that have a state."""
        return {name for name, _ in self._pieces}

    def keys(self, parameter: str) -> list[str]:
        """What is stored of a parameter."""
        return sorted(key for name, key in self._pieces if name == parameter)

    def size(self) -> int:
        """Entries of all pieces, the numbers for whole parameters left out."""
        return sum(end - begin for pieces in self._pieces.values() for begin, end, _, _ in pieces if end is not None)

    def read(self, key: str, parameter: str, begin: int, end: int) -> Tensor:
        """Entries `begin` to `end` of a parameter's state, fp32 [end - begin] on the CPU; a number for all has no dimension.

        Raises:
            UserError: no piece holds one of them.
        """
        parts, at = [], begin
        for first, last, file, entry in self._pieces.get((parameter, key), []):
            if last is None:
                return file.load(entry).clone()
            if first <= at < min(last, end):
                stop = min(last, end)
                parts.append(file.load_part(entry, at - first, stop - first))
                at = stop
        if at < end:
            raise UserError(
                f"an optimizer's state must be whole: {self.directory} lacks entries {at} to {end} of {key} of {parameter}; "
                f"{_REMEDY}"
            )
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts)
