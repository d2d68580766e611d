"""The base's shards in an export: the same files, or the same data under other names.

Each is read once: a piece is copied, the copy is read back and hashed. What those hashes say is both that the base is the one
that was trained on, and that its copy is whole.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from megatron_patch.io.hashes import file_sha256, model_file_hashes
from megatron_patch.io.raw_safetensors import RawFile, header_bytes
from megatron_patch.io.safetensors_dir import SINGLE_FILE, SafetensorsDir

RENAMED_SINGLE = "model-base-00001-of-00001.safetensors"  # beside an index, readers would take model.safetensors alone
_PIECE_BYTES, _BUFFER_BYTES = 1 << 24, 1 << 20
_THREADS = 8  # at most; hashing and copying leave Python's lock


@dataclass(frozen=True)
class Placed:
    """The base's shards, where they went.

    Attributes:
        weight_map: tensor -> file of the export.
        base: file of the base -> (bytes, SHA-256), as read from the copies where there are some; every file that counts
            (`io.hashes.model_file_hashes`).
        copies: file of the export -> SHA-256.
    """

    weight_map: dict[str, str]
    base: dict[str, tuple[int, str]]
    copies: dict[str, str]


def target_name(file: str) -> str:
    """The name of a base's file in an export."""
    return RENAMED_SINGLE if file == SINGLE_FILE else file


def place_base(source: SafetensorsDir, output: Path, how: str, progress: bool) -> Placed:
    """Copy or link the base's files.

    Args:
        how: "copy" (on file systems that can, without using space twice) or "symlink".
    """

    def place(file: str, moved: Callable[[int], object]) -> tuple[str, str]:
        original, target = source.path / file, output / target_name(file)
        if how == "copy":
            return _copy(original, target, moved)
        target.symlink_to(original.resolve())
        return (file_sha256(original, moved),) * 2

    return _place(source, {name: name for name in source}, place, f"{how} base", progress)


def rename_in_base(source: SafetensorsDir, output: Path, names: Mapping[str, str], progress: bool) -> Placed:
    """The base's files with other tensor names in their headers and the same data; the weight map has the new names.

    Args:
        names: every tensor of the base -> its name in the export. One that is not there cannot be left out: loaders
            read every tensor of a file, also those that the index does not name.
    """

    def place(file: str, moved: Callable[[int], object]) -> tuple[str, str]:
        raw = RawFile(source.path / file)
        tensors = raw.tensors.values()
        header = header_bytes([(names[t.name], t.dtype, t.shape, t.nbytes) for t in tensors], raw.metadata)
        start = min((t.start for t in tensors), default=raw.path.stat().st_size)
        return _copy(raw.path, output / target_name(file), moved, header=header, start=start)

    return _place(source, names, place, "copy base", progress)


def _place(
    source: SafetensorsDir, names: Mapping[str, str], place: Callable[..., tuple[str, str]], label: str, progress: bool
) -> Placed:
    """Run `place`, which returns (hash of the original, hash of the copy), on every file, several at a time."""
    sizes = {file: (source.path / file).stat().st_size for file in source.files}
    with (
        tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, desc=label, disable=not progress) as bar,
        ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as pool,
    ):
        try:
            hashes = dict(zip(sizes, pool.map(lambda file: place(file, bar.update), sizes), strict=True))
        except BaseException:
            pool.shutdown(cancel_futures=True)  # a full disk fills for the other files, too
            raise
    known = {file: (sizes[file], original) for file, (original, _) in hashes.items()}
    return Placed(
        weight_map={names[name]: target_name(source.file_of(name)) for name in source},
        base=model_file_hashes(source.path, known=known),
        copies={target_name(file): copied for file, (_, copied) in hashes.items()},
    )


def damaged_copy(source: Path, placed: Placed) -> OSError | None:
    """The reason, if the base itself is not what its copies say that it is. Reads the base again."""
    for file, found in model_file_hashes(source).items():
        if placed.base[file] != found:
            return OSError(f"the copy of {source / file} differs from it: the disk or its driver is at fault")
    return None


def _copy(
    source: Path, target: Path, moved: Callable[[int], object], *, header: bytes | None = None, start: int = 0
) -> tuple[str, str]:
    """Write the source, or `header` and the source from `start` on; (hash of the source, hash of the copy).

    Both are of what the copy holds, and of the source's own first bytes where the header is another.
    """
    with open(source, "rb") as reader, open(target, "w+b") as writer:
        original = hashlib.sha256(reader.read(start))
        copied = original if header is None else hashlib.sha256(header)
        writer.write(header or b"")
        writer.flush()
        buffer = memoryview(bytearray(_BUFFER_BYTES))  # used again: fresh memory costs as much as the hash
        for begin, count in _copied_pieces(reader, writer, start):
            end = begin + count
            while begin < end:
                piece = buffer[: os.preadv(writer.fileno(), [buffer[: end - begin]], begin)]
                if not piece:
                    raise OSError(f"{target} ended at byte {begin}, {end} were written: the disk or its driver is at fault")
                begin += len(piece)
                original.update(piece)
                if copied is not original:
                    copied.update(piece)
            moved(count)
    return original.hexdigest(), copied.hexdigest()


def _copied_pieces(reader, writer, start: int) -> Iterable[tuple[int, int]]:
    """Append the reader's bytes from `start` on to the writer; yields (position, bytes) of each piece when it is there.

    In the kernel, which shares blocks where the file system can (XFS, btrfs), elsewhere plainly.
    """
    end = writer.tell()
    while True:
        try:
            count = os.copy_file_range(reader.fileno(), writer.fileno(), _PIECE_BYTES, start, end)
        except OSError:  # not on this pair of file systems; a disk that is full says so again
            piece = os.pread(reader.fileno(), _PIECE_BYTES, start)
            count = os.pwrite(writer.fileno(), piece, end)  # of a disk that is nearly full, fewer than were read
        if not count:
            return
        yield end, count
        start, end = start + count, end + count
