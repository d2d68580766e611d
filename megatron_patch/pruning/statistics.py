"""What is known about each expert, as sums: per MoE layer, expert and data source.

Sums of parts add up to the sum of the whole, so many workers can observe, sources can be weighed anew and a criterion
changed without a second run.

File: one .safetensors; tensors `<source>/<field>`; a JSON object in the header's metadata under
`dsa_upcycle.statistics`: {"schema": 1, "model_type", "model_sha256", "layers", "num_experts", "top_k", "sources"}.

Shape letters: L MoE layers in ascending order, E routed experts of a layer.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_patch.errors import UserError
from megatron_patch.io.publish import atomic_write_bytes
from megatron_patch.io.safetensors_dir import INDEX_FILE, SINGLE_FILE

SCHEMA = 1
METADATA_KEY = "dsa_upcycle.statistics"
PROGRESS_KEY = "dsa_upcycle.progress"  # in a file that an unfinished run left


@dataclass(frozen=True)
class SourceStatistics:
    """One data source. All fields are additive but `gate_norm_max`, which is a maximum.

    The weight is the routing weight as applied: after normalisation and scaling. Statistics made of recorded expert ids
    know no weights: their `gate_*` are NaN.

    Attributes:
        tokens: tokens seen, padding excluded.
        count: int64 [L, E]; times expert e of MoE layer l was chosen.
        gate_sum: float64 [L, E]; sum of routing weights.
        gate_norm_sum: float64 [L, E]; sum of weight * ||expert output||.
        gate_norm_square: float64 [L, E]; sum of (weight * ||expert output||)^2.
        gate_norm_max: float64 [L, E]; largest weight * ||expert output||.
    """

    tokens: int
    count: Tensor
    gate_sum: Tensor
    gate_norm_sum: Tensor
    gate_norm_square: Tensor
    gate_norm_max: Tensor

    @classmethod
    def zeros(cls, layers: int, experts: int) -> "SourceStatistics":
        """Nothing seen yet."""
        gates = (torch.zeros(layers, experts, dtype=torch.float64) for _ in GATE_FIELDS)
        return cls(0, torch.zeros(layers, experts, dtype=torch.int64), *gates)

    @classmethod
    def routed_only(cls, tokens: int, count: Tensor) -> "SourceStatistics":
        """Of recorded expert ids: NaN where routing weights would be needed."""
        return cls(tokens, count, *(torch.full(count.shape, math.nan, dtype=torch.float64) for _ in GATE_FIELDS))

    @property
    def has_gates(self) -> bool:
        """Whether routing weights were seen."""
        return not bool(self.gate_sum.isnan().any())

    def __add__(self, other: "SourceStatistics") -> "SourceStatistics":
        return SourceStatistics(
            self.tokens + other.tokens,
            self.count + other.count,
            self.gate_sum + other.gate_sum,
            self.gate_norm_sum + other.gate_norm_sum,
            self.gate_norm_square + other.gate_norm_square,
            torch.maximum(self.gate_norm_max, other.gate_norm_max),  # NaN wins, as in a sum
        )

    def weighted(self, weight: float) -> "SourceStatistics":
        """As though everything had been seen `weight` times. `count` becomes float64; the maximum stays."""
        return SourceStatistics(
            round(self.tokens * weight),
            self.count.double() * weight,
            self.gate_sum * weight,
            self.gate_norm_sum * weight,
            self.gate_norm_square * weight,
            self.gate_norm_max,
        )


TENSOR_FIELDS = tuple(field.name for field in dataclasses.fields(SourceStatistics) if field.name != "tokens")
GATE_FIELDS = TENSOR_FIELDS[1:]


@dataclass(frozen=True)
class Statistics:
    """Statistics of one model.

    Attributes:
        model_type: of its config.json.
        model_sha256: see `model_sha256`.
        layers: numbers of the MoE layers, ascending; row l of the tensors is `layers[l]`.
        num_experts: routed experts of a layer, E.
        top_k: experts that a token is sent to.
        sources: by name.
    """

    model_type: str
    model_sha256: str
    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    sources: dict[str, SourceStatistics]

    def save(self, path: str | Path, progress: Mapping[str, Any] | None = None) -> None:
        """Write the file, as a whole or not at all.

        Args:
            progress: of an unfinished run; `load` refuses a file that has it, `load_progress` returns it.
        """
        tensors = {}
        for name, source in self.sources.items():
            check_source_name(name)
            tensors[f"{name}/tokens"] = torch.tensor(source.tokens, dtype=torch.int64)
            tensors |= {f"{name}/{field}": getattr(source, field).contiguous() for field in TENSOR_FIELDS}
        head = {key: value for key, value in vars(self).items() if key != "sources"}
        metadata = {METADATA_KEY: json.dumps({"schema": SCHEMA, **head, "sources": list(self.sources)})}
        if progress is not None:
            metadata[PROGRESS_KEY] = json.dumps(progress)
        atomic_write_bytes(path, safetensors.torch.save(tensors, metadata))

    @classmethod
    def load(cls, path: str | Path) -> "Statistics":
        """Read and check a file.

        Raises:
            UserError: no such file, not one of statistics, of an unfinished run, or numbers that cannot be.
        """
        statistics, progress = load_progress(path)
        if progress is not None:
            raise UserError(
                f"statistics must be whole: {path} is of a run that did not finish; run its command again with --resume"
            )
        return statistics

    def merge(self, *others: "Statistics") -> "Statistics":
        """The sum; sources of the same name are added.

        Raises:
            UserError: they are not of the same model.
        """
        for other in others:
            for key in ("model_type", "model_sha256", "layers", "num_experts", "top_k"):
                mine, theirs = getattr(self, key), getattr(other, key)
                if mine != theirs:
                    raise UserError(
                        f"statistics of one model can be merged: {key} differs, {mine!r} and {theirs!r}; merge those of "
                        "the same checkpoint"
                    )
        merged = dict(self.sources)
        for other in others:
            for name, source in other.sources.items():
                merged[name] = merged[name] + source if name in merged else source
        return dataclasses.replace(self, sources=merged)

    def combined(self, source_weights: Mapping[str, float] | None = None) -> SourceStatistics:
        """All sources as one.

        Args:
            source_weights: name -> how many times the source shall count; a source that is not named counts once, one
                with weight 0 not at all. With weights, `count` is float64 and `tokens` is rounded.

        Raises:
            UserError: an unknown source, a weight that is negative or not finite, or nothing left.
        """
        if source_weights is None:
            return reduce(SourceStatistics.__add__, self.sources.values())
        for name, weight in source_weights.items():
            if name not in self.sources:
                near = difflib.get_close_matches(name, self.sources, n=1)
                hint = f"did you mean {near[0]}; " if near else ""
                raise UserError(f"unknown source {name}; {hint}the statistics have {', '.join(self.sources)}")
            if not math.isfinite(weight) or weight < 0:
                raise UserError(f"a source's weight must be 0 or more: {name} has {weight}; give a finite number")
        weights = {name: source_weights.get(name, 1.0) for name in self.sources}
        parts = [self.sources[name].weighted(weight) for name, weight in weights.items() if weight > 0]
        if not parts:
            raise UserError(f"a source must count: all of {', '.join(self.sources)} have weight 0; raise one")
        return reduce(SourceStatistics.__add__, parts)


def model_sha256(directory: str | Path) -> str:
    """Which model: SHA-256 of the index's bytes, or of the JSON header of a single safetensors file.

    Cheap, so not a hash of the weights: it tells checkpoints of different layout apart, not every fine-tuned copy.

    Raises:
        UserError: neither file is there, or the single one is truncated.
    """
    index, single = Path(directory) / INDEX_FILE, Path(directory) / SINGLE_FILE
    if index.is_file():
        return hashlib.sha256(index.read_bytes()).hexdigest()
    if not single.is_file():
        raise UserError(f"a model's directory has {INDEX_FILE} or {SINGLE_FILE}: {directory} has neither; check the path")
    with open(single, "rb") as file:
        size = file.read(8)
        header = file.read(struct.unpack("<Q", size)[0]) if len(size) == 8 and size[5:] == b"\0\0\0" else b""
    if not header.endswith((b"}", b" ")):
        raise UserError(f"a safetensors file must be whole: {single} has no header; download or copy it again")
    return hashlib.sha256(header).hexdigest()


def check_source_name(name: str) -> str:
    """The name, if it can be part of a tensor's name.

    Raises:
        UserError: it cannot.
    """
    if not name or "/" in name or not name.isprintable() or name != name.strip():
        raise UserError(f"a source's name must be printable and without '/': {name!r}; give another with --source")
    return name


def load_progress(path: str | Path) -> tuple[Statistics, dict[str, Any] | None]:
    """Statistics, and the progress of the run that they are of if it did not finish. Errors as in `Statistics.load`."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"a statistics file must exist: {path} does not; make one with `dsa-upcycle prune observe`")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        head = json.loads(metadata[METADATA_KEY])
        if head.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        names = head.pop("sources")
        statistics = Statistics(**{**head, "layers": tuple(head["layers"])}, sources={})
        for name in names:
            statistics.sources[name] = _checked(statistics, name, tensors)
        if not names or tensors.keys() - {f"{name}/{field}" for name in names for field in ("tokens", *TENSOR_FIELDS)}:
            raise ValueError("its tensors are not those of its sources")
        return statistics, json.loads(metadata[PROGRESS_KEY]) if PROGRESS_KEY in metadata else None
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        detail = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"a statistics file is what `dsa-upcycle prune observe` wrote: {path}: {detail}; observe again"
        ) from None


def _checked(statistics: Statistics, name: str, tensors: Mapping[str, Tensor]) -> SourceStatistics:
    """One source's tensors, if they can be true."""
    shape = (len(statistics.layers), statistics.num_experts)
    source = SourceStatistics(int(tensors[f"{name}/tokens"]), *(tensors[f"{name}/{field}"] for field in TENSOR_FIELDS))
    for field in TENSOR_FIELDS:
        tensor, dtype = getattr(source, field), torch.int64 if field == "count" else torch.float64
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"{name}/{field} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
    if bool((source.count < 0).any()) or bool((source.count.sum(1) != source.tokens * statistics.top_k).any()):
        raise ValueError(f"in {name} a layer's counts do not add up to {source.tokens} tokens * top {statistics.top_k}")
    return source
