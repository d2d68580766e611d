"""Rows of numbers in one file, each of which is there as a whole or not at all.

    DIR/manifest.json   what the rows are of (`key`), how many, how long; written last, so that a DIR with it is complete
    DIR/values.bin      the rows end to end, [tokens, width] in the dtype of the manifest, without a header: sparse until reserved
    DIR/rows.bin        16 bytes a row: a hash of the tokens that it was computed from (0: not there yet), a sum over its values

A row's record is written after its values, so that a process that is killed leaves no half row behind. A machine that loses its
power can write the record to the disk first: then the sum does not fit, and the row counts as not there. Any number of processes
read and write at once, on one file system: two that write one row write the same numbers.
"""

import hashlib
import os
import shutil
import struct
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_patch.errors import DISK_FULL, UserError
from megatron_patch.io.lock import only_writer
from megatron_patch.io.publish import atomic_write_json, naming_full_disk
from megatron_patch.io.strict_json import read_json

SCHEMA = 1
MANIFEST, VALUES, ROWS = "manifest.json", "values.bin", "rows.bin"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_RECORD = struct.Struct("<QQ")


class RowStore:
    """An open store.

    Args:
        directory: that `create_or_check` made or found fit.
        starts: int64 [rows + 1], the first token of each row, and the end of the last.
        width: numbers of a token.
        dtype: "bf16" or "fp32".
    """

    def __init__(self, directory: Path, starts: np.ndarray, width: int, dtype: str):
        self.directory, self.starts, self.width, self.dtype = directory, starts, width, DTYPES[dtype]
        self.token_bytes = width * self.dtype.itemsize
        self._values, self._records = (os.open(directory / name, os.O_RDWR) for name in (VALUES, ROWS))
        for file in (self._values, self._records):
            weakref.finalize(self, os.close, file)
        self.damaged: list[int] = []

    def read(self, row: int, tokens: Tensor) -> Tensor | None:
        """The row, [n, width] on the CPU in the store's dtype; None: not there, or damaged, which `damaged` then lists.

        Args:
            row: its number.
            tokens: int64 [n] on the CPU, what it was computed from.

        Raises:
            UserError: it was computed from other tokens.
        """
        try:
            record = os.pread(self._records, _RECORD.size, row * _RECORD.size)
        except OSError:  # the disk fails
            self.damaged.append(row)
            return None
        whole = record.ljust(_RECORD.size, b"\0")
        written_from, total = _RECORD.unpack(whole)
        if not written_from:
            return None
        if len(record) < len(whole):  # cut in two: what is left of it says nothing of the tokens
            self.damaged.append(row)
            return None
        if written_from != tokens_hash(tokens):
            raise UserError(
                f"a trunk cache belongs to its data: row {row} of {self.directory} was computed from other tokens than the data "
                "have there now; give another --trunk-cache, or the data that it was made from"
            )
        begin, end = self._bytes(row)
        values = np.empty(end - begin, np.uint8)
        if not _read_all(self._values, values, begin) or _sum(values) != total:
            self.damaged.append(row)
            return None
        return torch.from_numpy(values).view(self.dtype).view(-1, self.width)

    def write(self, row: int, tokens: Tensor, values: Tensor) -> None:
        """Store [n, width] in the store's dtype, on any device; then, and not before, it can be read."""
        flat = values.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1)
        begin, end = self._bytes(row)
        assert flat.size == end - begin, (row, flat.size, end - begin)
        _write_all(self._values, flat, begin)
        _write_all(self._records, _RECORD.pack(tokens_hash(tokens), _sum(flat)), row * _RECORD.size)

    def expect(self, row: int) -> None:
        """Tell the system that the row is read soon."""
        begin, end = self._bytes(row)
        os.posix_fadvise(self._values, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def missing(self, rows: np.ndarray) -> np.ndarray:
        """Those of `rows` that are not there."""
        return rows[~self._written()[rows]]

    def reserve(self, rows: np.ndarray, say: Callable[[str], None]) -> None:
        """Take the disk's space for `rows` (ascending) now: a full disk shows at the start, not in the middle of a run.

        Args:
            say: gets the line with the size, before anything is taken.

        Raises:
            UserError: the disk cannot hold them.
        """
        missing, written = self.missing(rows), self._written().nonzero()[0]
        reserved = max(0, os.fstat(self._values).st_blocks * 512 - self._size(written))  # by a run that did not fill it
        wanted, free = max(0, self._size(missing) - reserved), shutil.disk_usage(self.directory).free
        tokens = self._size(rows) // self.token_bytes
        say(
            f"trunk cache {self.directory}: {len(rows):,} rows, {tokens:,} tokens x {self.width:,} x {self.dtype.itemsize} bytes = "
            f"{amount(self._size(rows))}; {len(rows) - len(missing):,} rows are there, {amount(wanted)} more are needed, "
            f"{amount(free)} are free"
        )
        full = UserError(
            f"the disk must hold the trunk cache: {self.directory} needs {amount(wanted)} more, {amount(free)} are free; give "
            "another --trunk-cache, free some, or take fewer tokens"
        )
        if wanted > free:
            raise full
        for begin, end in _runs(missing):
            first, last = (int(self.starts[row]) * self.token_bytes for row in (begin, end))
            try:
                os.posix_fallocate(self._values, first, last - first)
            except OSError as error:
                if error.errno in DISK_FULL:
                    raise full from None
                raise

    def _bytes(self, row: int) -> tuple[int, int]:
        return int(self.starts[row]) * self.token_bytes, int(self.starts[row + 1]) * self.token_bytes

    def _size(self, rows: np.ndarray) -> int:
        return int((self.starts[rows + 1] - self.starts[rows]).sum()) * self.token_bytes

    def _written(self) -> np.ndarray:
        """bool [rows]."""
        return np.fromfile(self.directory / ROWS, dtype="<u8").reshape(-1, 2)[:, 0] != 0


def create_or_check(directory: Path, key: Mapping[str, object], starts: np.ndarray, width: int, remedies: Mapping[str, str]) -> bool:
    """Make an empty store of these rows (True), or see that the one that is there is of them. One process of a run calls it.

    Args:
        directory: new, empty, or a store.
        key: JSON values that decide what the rows are.
        starts, width: as `RowStore`'s; `key["dtype"]` is its dtype.
        remedies: for a value of the key that differs, what to do other than take another directory.

    Raises:
        UserError: the directory holds something else, or a store of other rows.
    """
    ours = {**key, "rows": len(starts) - 1, "tokens": int(starts[-1]), "width": width}
    sizes = {VALUES: int(starts[-1]) * width * DTYPES[str(key["dtype"])].itemsize, ROWS: (len(starts) - 1) * _RECORD.size}
    check_place(directory)
    with only_writer(directory, "--trunk-cache", wait=True):  # two runs may start at once
        if not (directory / MANIFEST).exists():
            for name, size in sizes.items():
                with naming_full_disk(directory), open(directory / name, "wb") as file:  # no file system takes any length
                    file.truncate(size)
            atomic_write_json(directory / MANIFEST, {"schema": SCHEMA, "key": ours, "bytes": sizes})
            return True
    _check(directory, ours, sizes, remedies)
    return False


def check_place(directory: Path) -> None:
    """See that a store is there, or can be made.

    Raises:
        UserError: the path is none of a directory, or the directory holds something else.
    """
    if directory.is_symlink() and not directory.exists():
        raise UserError(f"--trunk-cache must be a directory: {directory} is a link that leads nowhere; give another path")
    if directory.exists() and not directory.is_dir():
        raise UserError(f"--trunk-cache must be a directory: {directory} is a file; give another path")
    if not directory.exists() or (directory / MANIFEST).exists():
        return
    # Values and records without a manifest are those of a store whose making was interrupted.
    others = sorted(item.name for item in directory.iterdir() if item.name not in (VALUES, ROWS))
    if others:
        raise UserError(
            f"--trunk-cache must be a trunk cache, or new or empty: {directory} has {others[0]} and no {MANIFEST}; give another path"
        )


def remove(directory: Path) -> None:
    """Take a store away, and its directory if it holds nothing else."""
    for name in (MANIFEST, ROWS, VALUES):  # the manifest first: without it the rest is no store
        (directory / name).unlink()
    if not any(directory.iterdir()):
        directory.rmdir()


def _check(directory: Path, ours: Mapping[str, object], sizes: Mapping[str, int], remedies: Mapping[str, str]) -> None:
    try:
        manifest = read_json(directory / MANIFEST)
        schema, theirs = manifest["schema"], dict(manifest["key"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"a trunk cache has a readable {MANIFEST}: {directory}: {error!r}; delete it, or give another path") from None
    if schema != SCHEMA:
        raise UserError(f"a trunk cache has schema {SCHEMA}: {directory} has {schema}; delete it, or give another path")
    for name, value in ours.items():
        if theirs.get(name) != value:
            remedy = remedies.get(name)
            raise UserError(
                f"a trunk cache belongs to one base and one data set: {name} is {_short(theirs.get(name))} in {directory}, "
                f"{_short(value)} in this run; {remedy + ', or ' if remedy else ''}give another --trunk-cache"
            )
    for name, size in sizes.items():
        found = (directory / name).stat().st_size if (directory / name).exists() else 0
        if found != size:
            raise UserError(
                f"a trunk cache must be whole: {directory / name} has {found} bytes, its manifest says {size}; delete {directory}"
            )


def tokens_hash(tokens: Tensor) -> int:
    """Of int64 [n] on the CPU, never 0."""
    digest = hashlib.blake2b(tokens.contiguous().numpy().data, digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def amount(size: float) -> str:
    """Bytes as people read them."""
    units = ["B", "KB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:,.0f} B" if units[0] == "B" else f"{size:,.2f} {units[0]}"


def _sum(values: np.ndarray) -> int:
    """Of all 64-bit words (or bytes), modulo 2**64: some 10 times as fast as a CRC, and a page that never reached the disk shows."""
    word = np.uint64 if values.size % 8 == 0 else np.uint8
    return int(np.add.reduce(values.view(word), dtype=np.uint64))


def _runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """Ascending numbers as (first, behind the last) of each run without a gap."""
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, cuts) if len(run)]


def _read_all(file: int, into: np.ndarray, offset: int) -> bool:
    """Fill `into`; False where the file ends, or the disk fails, before. (Through a mapping, both would kill the process, without a word.)"""
    view = memoryview(into)
    while len(view):
        try:
            count = os.preadv(file, [view], offset)
        except OSError:
            return False
        if not count:
            return False
        view, offset = view[count:], offset + count
    return True


def _write_all(file: int, data: bytes | np.ndarray, offset: int) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _short(value: object) -> object:
    return value[:12] if isinstance(value, str) and len(value) == 64 else value
