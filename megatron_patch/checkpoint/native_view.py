"""The native layout of one export: writes what the base's layers get, and says what is true of the result."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from megatron_patch.checkpoint import native_weights
from megatron_patch.checkpoint.base_indexers import BaseIndexers
from megatron_patch.checkpoint.base_shards import Placed, rename_in_base
from megatron_patch.checkpoint.layouts import NATIVE, export_tensors
from megatron_patch.checkpoint.load_base import base_dtype
from megatron_patch.io.safetensors_dir import SafetensorsDir
from megatron_patch.model.architecture import Architecture, DsaSettings


@dataclass(frozen=True)
class NativeView:
    """A base and the DSA layers on it, seen as a model whose layers are all DSA.

    Attributes:
        source: the base's weights.
        arch, pattern, dsa: of the exported model; `arch` is the base's.
        indexers: trained ones for the base's layers; None: neutral ones.

    Raises:
        UserError: a norm weight of the base that cannot be divided by.
    """

    source: SafetensorsDir
    arch: Architecture
    pattern: tuple[str, ...]
    dsa: DsaSettings
    indexers: BaseIndexers | None = None

    def __post_init__(self) -> None:
        for _ in native_weights.latents_of_base(self.source, self.arch.num_layers):
            ...  # a weight that cannot be divided by is found before anything is copied

    def write_base(
        self, output: Path, most_bytes: int, progress: bool
    ) -> tuple[Placed, dict[str, tuple[str, int]]]:
        """Write the base's layers; (the base's tensors, name -> (file, bytes) of the new ones)."""
        tensors = export_tensors(NATIVE, self.arch, self.pattern, self.dsa)
        dtype = base_dtype(self.source)
        names = {name: tensors.kept.get(name, name) for name in self.source}

        def indexer(layer: int) -> dict[str, Tensor]:
            if self.indexers is not None:
                return self.indexers.of_layer(layer)
            return native_weights.neutral_indexer(tensors.shapes, layer, dtype)

        placed = rename_in_base(self.source, output, names, progress)
        return placed, native_weights.write_base_additions(
            self.source, self.arch.num_layers, dtype, output, indexer, most_bytes
        )

    @cached_property
    def effect(self) -> native_weights.EpsEffect:
        """What the second eps does in layer 0."""
        return native_weights.eps_effect(self.source, self.arch.norm_eps)

    def kernel_notes(self) -> list[str]:
        return native_weights.kernel_notes(self.dsa)

    def notes(self) -> list[str]:
        """For the console."""
        neutral = f"the base's indexers are neutral: the export is right for contexts of at most {self.dsa.index_topk} tokens"
        return [
            *self.kernel_notes(),
            f"layer 0's query latent multiplies the query by f(v): |f(v) - 1| has median {self.effect.median:.1e}, at most "
            f"{self.effect.largest:.1e} over the embedding's rows",
            *([neutral] if self.indexers is None else []),
        ]

    def record(self) -> dict:
        """For the manifest."""
        return {
            "base_indexers": {"kind": "neutral"} if self.indexers is None else self.indexers.record(),
            "context": f"<= index_topk = {self.dsa.index_topk}" if self.indexers is None else "any",
            "eps_effect_of_layer_0": {
                "median": self.effect.median,
                "largest": self.effect.largest,
                "rows": self.effect.rows,
                "rows_of_zeros": self.effect.zero_rows,
            },
        }
