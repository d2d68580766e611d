"""The base's shards in an export: the same files, or the same data under other names."""

import os
from collections.abc import Mapping
from pathlib import Path

from tqdm import tqdm

from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.raw_safetensors import RawFile, header_bytes
from megatron_patch.io.safetensors_dir import SINGLE_FILE, SafetensorsDir

RENAMED_SINGLE = "model-base-00001-of-00001.safetensors"  # beside an index, readers would take model.safetensors alone
_PIECE_BYTES = 1 << 26


def target_name(file: str) -> str:
    """The name of a base's file in an export."""
    return RENAMED_SINGLE if file == SINGLE_FILE else file


def place_base(
    source: SafetensorsDir, output: Path, how: str, hashes: Mapping[str, tuple[int, str]], progress: bool
) -> dict[str, str]:
    """Copy or link the base's files and read the copies back; returns tensor name -> file.

    Args:
        how: "copy" (on file systems that can, without using space twice) or "symlink".
        hashes: file -> (bytes, SHA-256) of the base's files.

    Raises:
        OSError: a copy differs from its source.
    """
    total = 0 if how == "symlink" else 2 * sum(hashes[file][0] for file in source.files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="copy base", disable=not progress or not total) as bar:
        for file in source.files:
            target = output / target_name(file)
            if how == "symlink":
                target.symlink_to((source.path / file).resolve())
                continue
            _copy(source.path / file, target, bar)
            if file_sha256(target, bar.update) != hashes[file][1]:
                raise _differs(target, source.path / file)
    return {name: target_name(source.file_of(name)) for name in source}


def rename_in_base(source: SafetensorsDir, output: Path, names: Mapping[str, str], progress: bool) -> dict[str, str]:
    """The base's files with other tensor names in their headers and the same data; returns new tensor name -> file.

    Args:
        names: every tensor of the base -> its name in the export. One that is not there cannot be left out: loaders
            read every tensor of a file, also those that the index does not name.

    Raises:
        OSError: a copy's data differ from their source's.
    """
    files = {file: RawFile(source.path / file) for file in source.files}
    total = 2 * sum(tensor.nbytes for raw in files.values() for tensor in raw.tensors.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="copy base", disable=not progress) as bar:
        for file, raw in files.items():
            tensors = raw.tensors.values()
            header = header_bytes([(names[t.name], t.dtype, t.shape, t.nbytes) for t in tensors], raw.metadata)
            start = min((t.start for t in tensors), default=0)
            _copy(raw.path, output / target_name(file), bar, header=header, start=start)
            if not _same_from(raw.path, start, output / target_name(file), len(header), bar):
                raise _differs(output / target_name(file), raw.path)
    return {names[name]: target_name(source.file_of(name)) for name in source}


def _copy(source: Path, target: Path, bar: tqdm, *, header: bytes = b"", start: int = 0) -> None:
    """`header`, then the source from `start` on: in the kernel, which shares blocks where the file system can (XFS,
    btrfs), elsewhere plainly."""
    before = bar.n
    with open(source, "rb") as reader, open(target, "wb") as writer:
        writer.write(header)
        writer.flush()
        reader.seek(start)
        try:
            while count := os.copy_file_range(reader.fileno(), writer.fileno(), _PIECE_BYTES):
                bar.update(count)
        except OSError:  # not on this pair of file systems
            reader.seek(start)
            writer.seek(len(header))
            writer.truncate()
            bar.n = before
            while piece := reader.read(_PIECE_BYTES):
                writer.write(piece)
                bar.update(len(piece))


def _same_from(first: Path, start: int, second: Path, offset: int, bar: tqdm) -> bool:
    """Whether two files hold the same bytes from these positions on."""
    with open(first, "rb") as one, open(second, "rb") as other:
        one.seek(start)
        other.seek(offset)
        while piece := one.read(_PIECE_BYTES):
            if other.read(len(piece)) != piece:
                return False
            bar.update(len(piece))
        return not other.read(1)


def _differs(target: Path, source: Path) -> OSError:
    return OSError(f"{target} differs from {source} after copying: the disk or its driver is at fault")
