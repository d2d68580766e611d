"""A shard of the source becomes a shard of the output: the bytes of what stays, under new names, through a fixed buffer.

Whole tensors are copied as they lie in the file, so FP8 blocks with their scales and packed FP4 keep every bit.
"""

import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.errors import UserError
from megatron_patch.io.raw_safetensors import RawTensor, header_bytes
from megatron_patch.pruning import tid2eid
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.families.family import Key, Role
from megatron_patch.pruning.plan_file import Plan

BUFFER_BYTES = 8 << 20
_BUFFERS = 4


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
        data = _table_bytes(checkpoint, plan, key.layer, tensor)
        return OutTensor(tensor.name, tensor.dtype, tensor.shape, len(data), data=data)
    row = tensor.nbytes // tensor.shape[0]
    pieces = tuple((tensor.start + row * expert, row) for expert in kept)
    return OutTensor(tensor.name, tensor.dtype, (len(kept), *tensor.shape[1:]), row * len(kept), pieces)


def _table_bytes(checkpoint: MoeCheckpoint, plan: Plan, number: int, tensor: RawTensor) -> bytes:
    import torch

    layer, entry = checkpoint.layers[number], plan.tid2eid[number]
    load = torch.tensor(entry["load"], dtype=torch.float64)
    if len(load) != checkpoint.routing.experts:
        raise UserError(f"a plan must give the load of every expert: layer {number} has {len(load)}; make it again")
    result = tid2eid.rewrite(checkpoint.load(layer.table), checkpoint.load(layer.router), plan.kept[number], load)
    if tid2eid.table_sha256(result.table) != entry["sha256"]:
        raise UserError(
            f"{tensor.name} must come out as the plan says: its hash differs; make the plan again on this machine"
        )
    return result.table.contiguous().numpy().tobytes()


def write_shard(source: Path, shard: OutShard, target: Path, progress: Callable[[int], object]) -> str:
    """Write a shard; memory stays within a few buffers. It is not flushed to the disk: that is waited for once, at the end.

    Args:
        source: the source's file.
        shard: what to write.
        target: a file that may be overwritten.
        progress: called with the bytes of data after each piece.

    Returns:
        SHA-256 of the file, hex.
    """
    digest = hashlib.sha256()
    with (
        open(source, "rb", buffering=0) as reader,
        open(target, "wb", buffering=0) as writer,
        _Hasher(digest) as hasher,
    ):
        os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        pieces: list[tuple[int, int] | bytes] = [(0, os.fstat(reader.fileno()).st_size)]
        if not shard.unchanged:
            head = header_bytes(((t.name, t.dtype, t.shape, t.nbytes) for t in shard.tensors), shard.metadata)
            pieces = [head, *_joined(shard.tensors)]
        for piece in pieces:
            if isinstance(piece, bytes):
                _write(writer, memoryview(piece))
                hasher.put(memoryview(piece), None)
                continue
            for view, buffer in _read(reader.fileno(), *piece, hasher):
                _write(writer, view)
                hasher.put(view, buffer)
                progress(len(view))
    return digest.hexdigest()


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


def _write(writer, view: memoryview) -> None:
    while view:
        view = view[writer.write(view) :]


def _read(number: int, start: int, length: int, hasher: "_Hasher") -> Iterator[tuple[memoryview, bytearray]]:
    for offset in range(start, start + length, BUFFER_BYTES):
        size = min(BUFFER_BYTES, start + length - offset)
        buffer = hasher.free()
        view, got = memoryview(buffer)[:size], 0
        while got < size:
            count = os.preadv(number, [view[got:]], offset + got)
            if not count:
                raise OSError(
                    f"the source became shorter while it was read: {size - got} bytes are missing at {offset + got}"
                )
            got += count
        yield view, buffer


class _Hasher:
    """Hashes what was written in a thread of its own, while the next piece is read; a few buffers go round."""

    def __init__(self, digest):
        self._digest = digest
        self._work: queue.Queue = queue.Queue()
        self._free: queue.Queue = queue.Queue()
        for _ in range(_BUFFERS):
            self._free.put(bytearray(BUFFER_BYTES))
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "_Hasher":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        """Wait until everything is hashed."""
        self._work.put(None)
        self._thread.join()

    def free(self) -> bytearray:
        """A buffer to read into; waits for one."""
        return self._free.get()

    def put(self, view: memoryview, buffer: bytearray | None) -> None:
        """Hash a view after those before it; its buffer, if it is one of ours, is free then."""
        self._work.put((view, buffer))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            view, buffer = item
            self._digest.update(view)
            if buffer is not None:
                self._free.put(buffer)
