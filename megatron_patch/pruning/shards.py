"""A shard of the source becomes a shard of the output: the bytes of what stays, under new names, through a fixed buffer.

Whole tensors are copied as they lie in the file, so FP8 blocks with their scales and packed FP4 keep every bit.
"""

import errno
import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from megatron_patch.io.raw_safetensors import RawTensor, header_bytes
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.families.family import Key, Role
from megatron_patch.pruning.plan_file import Plan, planned_table

CHUNK_BYTES = 8 << 20
_HASH_BYTES = 1 << 20  # stays in the processor's cache
_AHEAD_BYTES = 64 << 20  # in the page cache, not in the process


@dataclass(frozen=True)
class OutTensor:
    """A tensor to write: pieces (start, bytes) of the source file, or `data` computed anew."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: tuple[tuple[int, int], ...] = ()
    data: bytes | None = None


@dataclass(frozen=True)
class OutShard:
    """A file to write; `unchanged` where it is the source's file byte for byte."""

    file: str
    tensors: tuple[OutTensor, ...]
    unchanged: bool
    metadata: dict | None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def output_shards(checkpoint: MoeCheckpoint, plan: Plan) -> Iterator[OutShard]:
    """The files of the output, one for each file of the source that keeps a tensor, in its order and under its name.

    Hash tables are computed when their shard comes.

    Raises:
        UserError: a hash table does not come out as the plan says.
    """
    for file, raw in checkpoint.files.items():
        tensors: list[OutTensor] = []
        for name, tensor in raw.tensors.items():
            key = checkpoint.keys[name]
            if plan.drop_mtp and checkpoint.is_mtp(key):
                continue
            out = _pruned(checkpoint, plan, key, tensor)
            if out is not None:
                tensors.append(out)
        if not tensors:
            continue
        same = len(tensors) == len(raw.tensors) and all(
            out.name == name and out.nbytes == raw.tensors[name].nbytes and out.data is None
            for out, name in zip(tensors, raw.tensors)
        )
        yield OutShard(file, tuple(tensors), same, raw.metadata)


def pruned_nbytes(checkpoint: MoeCheckpoint, kept: dict[int, list[int]], drop_mtp: bool) -> int:
    """Bytes of all tensors after pruning."""
    total, stays = 0, {number: set(experts) for number, experts in kept.items()}
    for name, tensor in checkpoint.tensors.items():
        key = checkpoint.keys[name]
        if drop_mtp and checkpoint.is_mtp(key):
            continue
        if key.role is Role.EXPERT:
            total += tensor.nbytes if key.expert in stays[key.layer] else 0
        elif key.role in (Role.ROUTER, Role.BIAS):
            total += tensor.nbytes // tensor.shape[0] * len(kept[key.layer])
        else:
            total += tensor.nbytes
    return total


def _pruned(checkpoint: MoeCheckpoint, plan: Plan, key: Key, tensor: RawTensor) -> OutTensor | None:
    whole = OutTensor(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes, ((tensor.start, tensor.nbytes),))
    if key.role is Role.OTHER:
        return whole
    kept = plan.kept[key.layer]
    if key.role is Role.EXPERT:
        if key.expert not in kept:
            return None
        name = key.renamed(kept.index(key.expert))
        return OutTensor(name, tensor.dtype, tensor.shape, tensor.nbytes, whole.pieces)
    if key.role is Role.TABLE:
        if key.layer not in plan.tid2eid:
            return whole
        data = planned_table(checkpoint, plan, key.layer).contiguous().numpy().tobytes()
        return OutTensor(tensor.name, tensor.dtype, tensor.shape, len(data), data=data)
    row = tensor.nbytes // tensor.shape[0]
    pieces = tuple((tensor.start + row * expert, row) for expert in kept)
    return OutTensor(tensor.name, tensor.dtype, (len(kept), *tensor.shape[1:]), row * len(kept), pieces)


def write_shard(source: Path, shard: OutShard, target: Path, progress: Callable[[int], object]) -> str:
    """Write a shard; memory is a buffer or two. It is not flushed to the disk: that is waited for once, at the end.

    Args:
        source: the source's file.
        shard: what to write.
        target: a file that may be overwritten.
        progress: called with the bytes of data after each piece.

    Returns:
        SHA-256 of the file as it was written, hex.
    """
    with (
        open(source, "rb", buffering=0) as reader,
        open(target, "wb+", buffering=0) as writer,
        _Hasher(writer) as hasher,
    ):
        pieces: list[tuple[int, int] | bytes] = [(0, os.fstat(reader.fileno()).st_size)]
        if not shard.unchanged:
            head = header_bytes(((t.name, t.dtype, t.shape, t.nbytes) for t in shard.tensors), shard.metadata)
            pieces = [head, *_joined(shard.tensors)]
        copy = _Copier(reader.fileno(), writer.fileno())
        for chunk in _prefetched(reader.fileno(), list(_chunks(pieces))):
            if isinstance(chunk, bytes):
                _write(writer.fileno(), memoryview(chunk))
                hasher.written(len(chunk))
            else:
                copy(*chunk)
                hasher.written(chunk[1])
                progress(chunk[1])
    return hasher.hexdigest()


def _chunks(pieces: Iterable[tuple[int, int] | bytes]) -> Iterator[tuple[int, int] | bytes]:
    """Pieces of the source, long ones cut."""
    for piece in pieces:
        if isinstance(piece, bytes):
            yield piece
            continue
        start, length = piece
        for offset in range(start, start + length, CHUNK_BYTES):
            yield offset, min(CHUNK_BYTES, start + length - offset)


def _prefetched(number: int, chunks: list[tuple[int, int] | bytes]) -> Iterator[tuple[int, int] | bytes]:
    """The chunks; the kernel is told early what will be read, which it cannot guess across the gaps of dropped experts."""
    ahead, asked = 0, 0
    for chunk in chunks:
        while asked < len(chunks) and ahead < _AHEAD_BYTES:
            if not isinstance(chunks[asked], bytes):
                os.posix_fadvise(number, *chunks[asked], os.POSIX_FADV_WILLNEED)
                ahead += chunks[asked][1]
            asked += 1
        yield chunk
        if not isinstance(chunk, bytes):
            ahead -= chunk[1]


def _joined(tensors: tuple[OutTensor, ...]) -> Iterator[tuple[int, int] | bytes]:
    """The pieces of all tensors, neighbours in the source made one: long reads."""
    start, length = 0, 0
    for tensor in tensors:
        if tensor.data is not None:
            if length:
                yield start, length
            yield tensor.data
            length = 0
            continue
        for begin, nbytes in tensor.pieces:
            if length and begin == start + length:
                length += nbytes
            else:
                if length:
                    yield start, length
                start, length = begin, nbytes
    if length:
        yield start, length


def _write(number: int, view: memoryview) -> None:
    while view:
        view = view[os.write(number, view) :]


class _Copier:
    """Copies a range of one file to the end of another: in the kernel where the two file systems can, else through a buffer."""

    def __init__(self, reader: int, writer: int):
        self._reader, self._writer = reader, writer
        self._in_kernel = True
        self._buffer = bytearray()

    def __call__(self, offset: int, length: int) -> None:
        while length:
            count = self._kernel(offset, length) or self._plain(offset, length)
            if not count:
                raise OSError(f"the source became shorter while it was read: {length} bytes are missing at {offset}")
            offset, length = offset + count, length - count

    def _kernel(self, offset: int, length: int) -> int:
        if self._in_kernel:
            try:
                return os.copy_file_range(self._reader, self._writer, length, offset)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG):
                    raise
                self._in_kernel = False
        return 0

    def _plain(self, offset: int, length: int) -> int:
        if not self._buffer:
            self._buffer = bytearray(CHUNK_BYTES)
        view = memoryview(self._buffer)[: min(length, CHUNK_BYTES)]
        count = os.preadv(self._reader, [view], offset)
        _write(self._writer, view[:count])
        return count


class _Hasher:
    """Hashes a file in a thread while it is written, from what the file holds, a little behind its end."""

    def __init__(self, file: FileIO):
        self._file = file
        self._digest = hashlib.sha256()
        self._lengths: queue.Queue[int] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: OSError | None = None

    def __enter__(self) -> "_Hasher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until everything is hashed."""
        self._lengths.put(0)
        self._thread.join()

    def written(self, length: int) -> None:
        """So many bytes more are in the file."""
        if length:
            self._lengths.put(length)

    def hexdigest(self) -> str:
        """After the block."""
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()

    def _run(self) -> None:
        view, offset = memoryview(bytearray(_HASH_BYTES)), 0
        try:
            while length := self._lengths.get():
                while length:
                    count = os.preadv(self._file.fileno(), [view[: min(length, _HASH_BYTES)]], offset)
                    if not count:
                        raise OSError(f"{self._file.name} became shorter while it was written")
                    self._digest.update(view[:count])
                    offset, length = offset + count, length - count
        except OSError as error:
            self._error = error
