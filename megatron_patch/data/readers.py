"""Rows of input files, in order and with their numbers, so that a fault can be named as `file:line`."""

import gzip
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO
from zlib import error as ZlibError

from megatron_patch.errors import UserError
from megatron_patch.io.strict_json import parse_json

EXTENSIONS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
CHUNK_ROWS = 512
CHUNK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one file: undecoded lines of a jsonl file, or dictionaries of a parquet file."""

    path: str
    first: int  # number of rows[0] in the file, from 1
    rows: list[bytes] | list[dict[str, Any]]
    progress: float  # bytes of the file (as stored) that reading went through for these rows

    def where(self, offset: int) -> str:
        """Name of a row for messages: `file:line`."""
        return f"{self.path}:{self.first + offset}"


def extension(path: str | Path) -> str:
    """The supported extension of `path`.

    Raises:
        UserError: it has another one.
    """
    for suffix in EXTENSIONS:
        if Path(path).name.endswith(suffix):
            return suffix
    raise UserError(f"input files end in {', '.join(EXTENSIONS)}: {str(path)!r} does not; convert or rename it")


def check_inputs(paths: Sequence[str | Path]) -> None:
    """Refuse, before any work, inputs that cannot be read.

    Raises:
        UserError: no input, a missing or empty file, an unknown extension, or one file given twice.
    """
    if not paths:
        raise UserError("at least one input file is needed: --input is empty; name the files to read")
    seen: set[Path] = set()
    for path in map(Path, paths):
        extension(path)
        if not path.is_file():
            raise UserError(f"input files must exist: {str(path)!r} is not a file; check the path")
        if not os.access(path, os.R_OK):
            raise UserError(f"input files must be readable: {str(path)!r} is not; check its permissions")
        if path.stat().st_size == 0:
            raise UserError(f"input files must hold data: {str(path)!r} is empty (0 bytes); write it again")
        if path.resolve() in seen:
            raise UserError(f"each input file counts once: {str(path)!r} is given twice; remove one of the two")
        seen.add(path.resolve())


def describe_inputs(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Path, size and SHA-256 of each file, for the report that goes with the prepared data."""
    described = []
    for path in map(Path, paths):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        described.append({"path": str(path), "bytes": path.stat().st_size, "sha256": digest})
    return described


def read_chunks(path: str | Path, column: str | None = None) -> Iterator[Chunk]:
    """The file's rows, a chunk at a time; memory stays at a chunk (a row group's column of a parquet file).

    Args:
        path: a file with one of `EXTENSIONS`.
        column: read only this column of a parquet file.

    Raises:
        UserError: a damaged or truncated file, or a parquet file without that column.
    """
    kind = extension(path)
    try:
        yield from _parquet_chunks(Path(path), column) if kind == ".parquet" else _line_chunks(Path(path), kind)
    except (OSError, EOFError, ZlibError) as error:  # gzip, arrow's zstd and parquet readers raise these when damaged
        raise UserError(
            f"cannot read {str(path)!r}: {error}; the file is damaged or truncated, fetch it again"
        ) from error


def parse_row(chunk: Chunk, offset: int) -> dict[str, Any] | None:
    """Row `offset` of a chunk as a dictionary; None for a blank line.

    Raises:
        UserError: bad UTF-8, bad JSON, a key that stands twice, or JSON that is not an object; names `file:line`.
    """
    row = chunk.rows[offset]
    if isinstance(row, dict):
        return row
    if chunk.first + offset == 1:
        row = row.removeprefix(_BOM)  # Windows editors write one; JSON does not allow it
    if not row.strip():
        return None
    where = chunk.where(offset)
    try:
        value = parse_json(row.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start}); convert the file to UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: bad JSON ({error.msg} at column {error.colno}); write one JSON object per line and no line "
            "breaks in it"
        ) from None
    except ValueError as error:
        raise UserError(f"{where}: bad JSON ({error}); write one flat JSON object per line, each key once") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: a row must be a JSON object, not {type_name(value)}; write one {{...}} per line")
    return value


def type_name(value: Any) -> str:
    """The JSON name of a value's type, for messages."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _line_chunks(path: Path, kind: str) -> Iterator[Chunk]:
    with path.open("rb") as raw:
        first, rows, size, position = 1, [], 0, 0
        lines = _decompressed(raw, kind)  # held until the end: when collected, it closes `raw`
        for line in lines:
            rows.append(line)
            size += len(line)
            if len(rows) == CHUNK_ROWS or size >= CHUNK_BYTES:
                yield Chunk(str(path), first, rows, raw.tell() - position)
                first, rows, size, position = first + len(rows), [], 0, raw.tell()
        if rows:
            yield Chunk(str(path), first, rows, raw.tell() - position)


def _decompressed(raw: BinaryIO, kind: str) -> BinaryIO:
    if kind == ".jsonl.gz":
        return gzip.GzipFile(fileobj=raw)
    if kind == ".jsonl.zst":
        import pyarrow

        # Not the zstandard package: it reports a truncated file as a shorter one, without an error.
        return BufferedReader(pyarrow.input_stream(raw, compression="zstd"))
    return raw


def _parquet_chunks(path: Path, column: str | None) -> Iterator[Chunk]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column is not None and column not in names:
                raise missing_key(str(path), column, names)
            wanted = names if column is None else [column]
            if twice := [name for name in wanted if names.count(name) > 1]:
                raise UserError(f"{path}: columns must have names of their own: {twice[0]!r} is of two; rename one")
            total, first = max(file.metadata.num_rows, 1), 1
            for batch in file.iter_batches(CHUNK_ROWS, columns=wanted):
                rows = _to_rows(batch, str(path), first)
                yield Chunk(str(path), first, rows, path.stat().st_size * len(rows) / total)
                first += len(rows)
    except pyarrow.ArrowException as error:
        raise UserError(
            f"cannot read {str(path)!r}: {error}; the file is damaged or not parquet, fetch it again"
        ) from error


def _to_rows(batch: Any, path: str, first: int) -> list[dict[str, Any]]:
    """A record batch as dictionaries; a value that Python cannot hold is named by its row."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError):  # a string that is not UTF-8, a date beyond Python's: find its row
        rows: list[dict[str, Any]] = []
    for offset in range(batch.num_rows):
        try:
            rows += batch.slice(offset, 1).to_pylist()
        except (ValueError, OverflowError) as error:
            raise UserError(
                f"{path}:{first + offset}: a value cannot be read ({error}); mend the row or drop its column"
            ) from None
    return rows


def missing_key(where: str, key: str, present: Sequence[str]) -> UserError:
    """The error for a row or file without `key`; names the keys that are there."""
    return UserError(
        f"{where}: no key {key!r}; it has {', '.join(map(repr, sorted(present))) or 'no keys'}; choose one of these"
    )
