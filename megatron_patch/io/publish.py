"""Write so that a crash leaves either the old state or the new one, never a half."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_patch.errors import DISK_FULL, UserError


def require_empty(path: str | Path, flag: str = "--output") -> Path:
    """The path, if nothing is there or an empty directory.

    Raises:
        UserError: it exists and is not an empty directory.
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UserError(f"{flag} must be a new or empty directory: {path} is something else; give another path")
    if path.is_dir() and any(path.iterdir()):
        raise UserError(f"{flag} must be a new or empty directory: {path} is not empty; give another path or empty it")
    return path


@contextmanager
def naming_full_disk(path: str | Path) -> Iterator[None]:
    """Put `path` into the error of a disk that is full: a failed write does not say which file it was for, and a run writes to several
    disks."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in DISK_FULL:
            error.filename = str(path)
        raise


@contextmanager
def atomic_directory(path: str | Path, *, must_be_empty: bool = True) -> Iterator[Path]:
    """Yield a temporary sibling to fill; rename it to `path` when the block ends well, remove it when it does not.

    Every file is flushed to the disk before the rename. A process that is killed outright leaves only a hidden sibling
    `.NAME.partial-*`; the next call for the same path says so on stderr.

    Args:
        path: where the directory shall stand.
        must_be_empty: refuse a `path` that holds something; otherwise it is replaced as a whole (for an instant,
            between two renames, nothing stands there).

    Raises:
        UserError: `path` is not empty although it must be (at the start, or by the end), is a file, or a mount point.
    """
    path = Path(path).absolute()
    if must_be_empty or not path.is_dir() or path.is_symlink():
        require_empty(path)
    if path.is_mount():  # the sibling would fill the disk above it, and the rename at the end fail
        raise UserError(f"an output appears by a rename, which a mount point cannot take: {path} is one; give a directory below it")
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in sorted(path.parent.glob(f".{path.name}.partial-*")):
        print(f"note: {leftover} was left by a run that was killed, or belongs to one that still runs", file=sys.stderr)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    try:
        partial.chmod(0o777 & ~_umask())  # mkdtemp makes it private; an output is as readable as any other
        with naming_full_disk(path):
            yield partial
        for item in partial.rglob("*"):
            if not item.is_symlink():
                if item.is_file():  # safetensors creates its files readable by the owner alone
                    item.chmod(0o666 & ~_umask())
                flush(item)
        flush(partial)
        if must_be_empty:
            require_empty(path)  # another run may have been as quick; the rename refuses what comes after this line
            os.replace(partial, path)
        else:
            _swap_in(partial, path)
        flush(path.parent)
    except BaseException:  # an interrupt too: nothing half-written may stay
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _swap_in(partial: Path, path: Path) -> None:
    """Rename; a rename onto an empty directory succeeds, a filled one is moved aside first."""
    if not path.is_dir() or not any(path.iterdir()):
        os.replace(partial, path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.replaced-", dir=path.parent))
    os.replace(path, old)
    os.replace(partial, path)
    shutil.rmtree(old)


def atomic_write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file as a whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with naming_full_disk(path), os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def atomic_write_text(path: str | Path, text: str) -> None:
    """`atomic_write_bytes` of a text in UTF-8."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: str | Path, value: object) -> None:
    """`atomic_write_text` of `value` as JSON, indented, in its own key order, without NaN (which is no JSON)."""
    atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def flush(path: Path) -> None:
    """Wait until a file, or a directory's table of names, is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
