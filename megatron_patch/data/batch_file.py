"""Micro-batches in a file, to be looked at: `SAVE/non_finite/` keeps those that a run ended with.

    N/tokens, N/labels, N/loss_mask, N/valid, N/cu_seqlens     the fields of micro-batch N's `PackedBatch`
    N/positions                                                int64 [samples], counted over the whole run's samples
    N/rows                                                     int64 [samples], their numbers in the data, from 0 (pretraining: in megatron-core's order)
    N/loss                                                     float64 [], summed over the tokens that count

The file's `__metadata__` says which run and step, and which tokenizer made the tokens; all values are text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from megatron_patch.data.batch import PackedBatch
from megatron_patch.errors import UserError
from megatron_patch.io.publish import atomic_write_bytes
from megatron_patch.io.raw_safetensors import RawFile
from megatron_patch.io.safetensors_dir import SafetensorsFile

SCHEMA = "1"
META = ("schema", "kind", "iteration", "rank", "tokenizer", "tokenizer_sha256")
_FIELDS = tuple(field.name for field in fields(PackedBatch))


@dataclass
class KeptBatch:
    """A micro-batch, the samples in it, and the loss that it had."""

    batch: PackedBatch
    positions: list[int]
    rows: list[int]
    loss: float


def write_batches(path: Path, kept: Sequence[KeptBatch], meta: Mapping[str, str]) -> None:
    """Write the file as a whole or not at all.

    Args:
        meta: `META` without the schema.
    """
    tensors: dict[str, Tensor] = {}
    for number, each in enumerate(kept):
        found = {name: getattr(each.batch, name).cpu().contiguous() for name in _FIELDS}
        found |= {"positions": torch.tensor(each.positions), "rows": torch.tensor(each.rows)}
        found["loss"] = torch.tensor(each.loss, dtype=torch.float64)
        tensors |= {f"{number}/{name}": tensor for name, tensor in found.items()}
    atomic_write_bytes(path, save(tensors, {"schema": SCHEMA, **meta}))


def read_batches(path: Path) -> tuple[list[KeptBatch], dict[str, str]]:
    """(the micro-batches, the file's metadata).

    Raises:
        UserError: the file is damaged, or holds something else.
    """
    meta, file = RawFile(path).metadata or {}, SafetensorsFile(path)
    if meta.get("schema") != SCHEMA or not meta.keys() >= set(META):
        raise UserError(f"a file of micro-batches is of SAVE/non_finite: {path} holds something else; give another path")
    kept = []
    try:
        for number in range(len({name.partition("/")[0] for name in file.names})):
            read = {name: file.load(f"{number}/{name}") for name in (*_FIELDS, "positions", "rows", "loss")}
            batch = PackedBatch(**{name: read[name] for name in _FIELDS})
            kept.append(KeptBatch(batch, read["positions"].tolist(), read["rows"].tolist(), read["loss"].item()))
    except Exception as error:  # safetensors has one class for all
        raise UserError(f"a file of micro-batches must be whole: {path}: {error}; copy it again") from None
    return kept, meta
