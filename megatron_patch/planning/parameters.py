"""Parameter counts from the architecture alone, part by part.

The formulas are written out a second time on purpose, beside the checkpoint's table of names and shapes: the tests hold
the two, and the built model, against each other.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_patch.model.architecture import Architecture, DsaSettings
from megatron_patch.model.layer_pattern import DSA, check_pattern

Split = Literal["tensor", "experts", "whole"]


@dataclass(frozen=True)
class Part:
    """Some tensors of the model that are counted, placed and trained alike.

    Attributes:
        name: what they are, e.g. "routed experts".
        parameters: how many numbers, over all devices but without copies.
        split: over what they are spread: tensor-parallel ranks, expert-parallel ranks, or nothing.
        trainable: whether they belong to a DSA layer.
        layer: 0-based; -1 stands below all layers (embedding), the number of layers above them (final norm, head).
        active: how many of them one token uses.
    """

    name: str
    parameters: int
    split: Split
    trainable: bool
    layer: int
    active: int


def parts(arch: Architecture, pattern: tuple[str, ...], dsa: DsaSettings) -> list[Part]:
    """Everything that the model holds, bottom to top.

    Raises:
        UserError: the pattern is not the base's layers followed by DSA layers.
    """
    check_pattern(pattern, arch.num_layers)
    table = arch.vocab_size * arch.hidden_size
    top = len(pattern)
    found = [Part("embedding", table, "tensor", False, -1, arch.hidden_size)]
    for layer, kind in enumerate(pattern):
        found += _layer(arch, dsa, layer, kind == DSA)
    found.append(Part("norms", arch.hidden_size, "whole", False, top, arch.hidden_size))
    found.append(Part("head", table, "tensor", False, top, table))
    return found


def _layer(arch: Architecture, dsa: DsaSettings, layer: int, is_dsa: bool) -> list[Part]:
    """One transformer layer. `add(name, n, split)` counts n parameters that every token uses."""
    found: list[Part] = []

    def add(name: str, count: int, split: Split, active: int | None = None) -> None:
        found.append(Part(name, count, split, is_dsa, layer, count if active is None else active))

    hidden, heads, rank = arch.hidden_size, arch.num_heads, arch.kv_lora_rank
    add("norms", 2 * hidden + rank, "whole")
    add("attention", hidden * (rank + arch.qk_rope_head_dim), "whole")  # one key-value latent and one rope key
    add("attention", rank * heads * (arch.qk_nope_head_dim + arch.v_head_dim), "tensor")
    add("attention", heads * arch.v_head_dim * hidden, "tensor")
    if is_dsa:  # the query latent is as wide as the model
        add("norms", hidden, "whole")
        add("attention", hidden * hidden, "whole")
        add("attention", hidden * heads * arch.qk_head_dim, "tensor")
        add("indexer", hidden * dsa.index_n_heads * dsa.index_head_dim, "whole")
        add("indexer", hidden * dsa.index_head_dim + 2 * dsa.index_head_dim, "whole")  # key, and its LayerNorm
        add("indexer", hidden * dsa.index_n_heads, "whole")  # weight of each index head
    else:
        add("attention", hidden * heads * arch.qk_head_dim, "tensor")
    if not arch.is_moe(layer):
        add("dense FFN", 3 * hidden * arch.ffn_size, "tensor")
        return found
    expert = 3 * hidden * arch.moe_ffn_size
    add("router", arch.num_experts * hidden, "whole")
    add("routed experts", arch.num_experts * expert, "experts", arch.experts_per_token * expert)
    add("shared experts", arch.num_shared_experts * expert, "tensor")
    return found


@dataclass(frozen=True)
class Count:
    """Parameters of one kind of part, or of the model. `base` is frozen, `trainable` are the DSA layers."""

    base: int = 0
    trainable: int = 0
    active: int = 0

    @property
    def total(self) -> int:
        return self.base + self.trainable

    def __add__(self, other: "Count") -> "Count":
        return Count(self.base + other.base, self.trainable + other.trainable, self.active + other.active)


def count(found: list[Part]) -> tuple[dict[str, Count], Count]:
    """(counts by name, in order of appearance; their sum)."""
    by_name: dict[str, Count] = {}
    for part in found:
        own = Count(
            0 if part.trainable else part.parameters, part.parameters if part.trainable else 0, part.active
        )
        by_name[part.name] = by_name.get(part.name, Count()) + own
    return by_name, sum(by_name.values(), Count())
