"""Names: one table between Hugging Face's DeepSeek-V2 keys (one per expert) and megatron-core's, local spec.

The table is data and says everything once: both names, how tensors join, and their shapes. Both directions of the
conversion, the strict key checks and the expected shapes are derived from it. MLA needs no permutation for RoPE.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_patch.errors import UserError
from megatron_patch.model.architecture import Architecture, DsaSettings
from megatron_patch.model.layer_pattern import DSA, check_pattern


@dataclass(frozen=True)
class Rename:
    """One tensor, two names. `{i}` stands for the layer, `{e}` for the expert; the shape is in names of sizes."""

    megatron: str
    hf: str
    shape: tuple[str, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.hf,)


@dataclass(frozen=True)
class ConcatRows:
    """megatron-core keeps the `sources` as one matrix, one below the other in this order; `shape` is of each."""

    megatron: str
    sources: tuple[str, ...]
    shape: tuple[str, ...]


Rule = Rename | ConcatRows


def _mlp(megatron: str, hf: str, ffn: str) -> tuple[Rule, ...]:
    """A gated MLP: megatron-core's linear_fc1 is [gate; up]."""
    return (
        ConcatRows(
            f"{megatron}.linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), (ffn, "hidden")
        ),
        Rename(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight", ("hidden", ffn)),
    )


_M, _H = "decoder.layers.{i}.", "model.layers.{i}."
_MA, _HA = _M + "self_attention.", _H + "self_attn."

MODEL_RULES: tuple[Rule, ...] = (
    Rename("embedding.word_embeddings.weight", "model.embed_tokens.weight", ("vocab", "hidden")),
    Rename("decoder.final_layernorm.weight", "model.norm.weight", ("hidden",)),
    Rename("output_layer.weight", "lm_head.weight", ("vocab", "hidden")),
)
LAYER_RULES: tuple[Rule, ...] = (
    Rename(_M + "input_layernorm.weight", _H + "input_layernorm.weight", ("hidden",)),
    Rename(_M + "pre_mlp_layernorm.weight", _H + "post_attention_layernorm.weight", ("hidden",)),
    Rename(_MA + "linear_kv_down_proj.weight", _HA + "kv_a_proj_with_mqa.weight", ("kv_rank+rope", "hidden")),
    Rename(_MA + "kv_layernorm.weight", _HA + "kv_a_layernorm.weight", ("kv_rank",)),
    Rename(_MA + "linear_kv_up_proj.weight", _HA + "kv_b_proj.weight", ("heads*(nope+v)", "kv_rank")),
    Rename(_MA + "linear_proj.weight", _HA + "o_proj.weight", ("hidden", "heads*v")),
)
MLA_RULES: tuple[Rule, ...] = (Rename(_MA + "linear_q_proj.weight", _HA + "q_proj.weight", ("heads*qk", "hidden")),)
LATENT_RULES: tuple[Rule, ...] = (
    Rename(_MA + "linear_q_down_proj.weight", _HA + "q_a_proj.weight", ("q_rank", "hidden")),
    Rename(_MA + "q_layernorm.weight", _HA + "q_a_layernorm.weight", ("q_rank",)),
    Rename(_MA + "linear_q_up_proj.weight", _HA + "q_b_proj.weight", ("heads*qk", "q_rank")),
)
INDEXER_RULES: tuple[Rule, ...] = (
    Rename(_MA + "indexer.wq_b.weight", _HA + "indexer.wq_b.weight", ("index_heads*index_dim", "q_rank")),
    Rename(_MA + "indexer.wk.weight", _HA + "indexer.wk.weight", ("index_dim", "hidden")),
    Rename(_MA + "indexer.k_norm.weight", _HA + "indexer.k_norm.weight", ("index_dim",)),
    Rename(_MA + "indexer.k_norm.bias", _HA + "indexer.k_norm.bias", ("index_dim",)),
    Rename(_MA + "indexer.weights_proj.weight", _HA + "indexer.weights_proj.weight", ("index_heads", "hidden")),
)
DENSE_RULES: tuple[Rule, ...] = _mlp(_M + "mlp", _H + "mlp", "ffn")
MOE_RULES: tuple[Rule, ...] = (
    Rename(_M + "mlp.router.weight", _H + "mlp.gate.weight", ("experts", "hidden")),
    *_mlp(_M + "mlp.experts.local_experts.{e}", _H + "mlp.experts.{e}", "moe_ffn"),
    *_mlp(_M + "mlp.shared_experts", _H + "mlp.shared_experts", "shared_ffn"),
)


def sizes(arch: Architecture, dsa: DsaSettings) -> dict[str, int]:
    """The value of each size that the table's shapes name."""
    heads, qk, v = arch.num_heads, arch.qk_head_dim, arch.v_head_dim
    return {
        "vocab": arch.vocab_size,
        "hidden": arch.hidden_size,
        "kv_rank": arch.kv_lora_rank,
        "kv_rank+rope": arch.kv_lora_rank + arch.qk_rope_head_dim,
        "heads*(nope+v)": heads * (arch.qk_nope_head_dim + v),
        "heads*v": heads * v,
        "heads*qk": heads * qk,
        "q_rank": arch.hidden_size,  # the DSA layers' query latent is as wide as the model
        "index_heads": dsa.index_n_heads,
        "index_dim": dsa.index_head_dim,
        "index_heads*index_dim": dsa.index_n_heads * dsa.index_head_dim,
        "experts": arch.num_experts,
        "ffn": arch.ffn_size,
        "moe_ffn": arch.moe_ffn_size,
        "shared_ffn": arch.moe_ffn_size * arch.num_shared_experts,
    }


@dataclass(frozen=True)
class HybridMapping:
    """The table written out for one model: every parameter, by global layer and expert number.

    Attributes:
        rules: megatron-core name -> its rule, with `{i}` and `{e}` filled in.
    """

    rules: Mapping[str, Rule]

    @cached_property
    def entries(self) -> dict[str, tuple[str, ...]]:
        """megatron-core name -> the Hugging Face name(s) whose tensors it holds."""
        return {name: rule.sources for name, rule in self.rules.items()}

    @cached_property
    def megatron_name(self) -> dict[str, str]:
        """Hugging Face name -> the megatron-core name that holds it."""
        return {hf: name for name, sources in self.entries.items() for hf in sources}

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Every Hugging Face name."""
        return tuple(self.megatron_name)

    def to_hf(self, megatron_name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The Hugging Face tensors inside a megatron-core one: **views** of it, so that they can also be filled.

        Raises:
            KeyError: not a name of this model.
            ValueError: the rows do not divide among the sources.
        """
        sources = self.entries[megatron_name]
        if tensor.size(0) % len(sources):
            raise ValueError(f"{megatron_name}: {tensor.size(0)} rows do not divide by its {len(sources)} parts")
        return dict(zip(sources, tensor.chunk(len(sources)), strict=True))

    def to_megatron(self, megatron_name: str, hf_tensors: Mapping[str, Tensor]) -> Tensor:
        """The inverse: the megatron-core tensor made of its Hugging Face tensors (others in the mapping may stand by).

        Raises:
            KeyError: a name is not of this model, or a tensor is missing.
        """
        parts = [hf_tensors[hf] for hf in self.entries[megatron_name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def shapes(self, table: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> the shape it must have; `table` is what `sizes` returned."""
        return {hf: tuple(table[size] for size in rule.shape) for rule in self.rules.values() for hf in rule.sources}


def layer_rules(arch: Architecture, layer: int, kind: str) -> list[Rule]:
    """The filled-in rules of one layer; `kind` is its attention, dense or MoE follows from its number."""
    rules = [*LAYER_RULES, *(LATENT_RULES + INDEXER_RULES if kind == DSA else MLA_RULES)]
    rules += MOE_RULES if arch.is_moe(layer) else DENSE_RULES
    filled: list[Rule] = []
    for rule in rules:
        experts = range(arch.num_experts) if "{e}" in rule.megatron else (0,)
        filled += [_fill(rule, layer, expert) for expert in experts]
    return filled


def hybrid_mapping(arch: Architecture, pattern: tuple[str, ...]) -> HybridMapping:
    """The mapping of a base with DSA layers on top; without DSA layers, that of the base itself.

    Raises:
        UserError: the pattern is not the base's layers followed by DSA layers.
    """
    check_pattern(pattern, arch.num_layers)
    return _written_out(arch, pattern)


def native_mapping(arch: Architecture, num_layers: int) -> HybridMapping:
    """The names and shapes of a model of `num_layers` layers that are all DSA; the trainer builds none such."""
    return _written_out(arch, (DSA,) * num_layers)


def base_indexer_mapping(arch: Architecture) -> HybridMapping:
    """The indexers beside the base's layers alone: what `--train base-indexers` trains."""
    rules = [_fill(rule, layer, 0) for layer in range(arch.num_layers) for rule in INDEXER_RULES]
    return HybridMapping({rule.megatron: rule for rule in rules})


def _written_out(arch: Architecture, pattern: tuple[str, ...]) -> HybridMapping:
    rules = [*MODEL_RULES, *(rule for i, kind in enumerate(pattern) for rule in layer_rules(arch, i, kind))]
    mapping = HybridMapping({rule.megatron: rule for rule in rules})
    if len(mapping.rules) != len(rules) or len(mapping.megatron_name) != sum(len(rule.sources) for rule in rules):
        raise AssertionError("the table names a tensor twice")
    return mapping


def dsa_names(mapping: HybridMapping, arch: Architecture) -> dict[str, tuple[str, ...]]:
    """The part of `entries` that the DSA layers hold: what trains."""
    prefixes = tuple(f"decoder.layers.{i}." for i in range(arch.num_layers))
    in_layers = {name: hf for name, hf in mapping.entries.items() if name.startswith("decoder.layers.")}
    return {name: hf for name, hf in in_layers.items() if not name.startswith(prefixes)}


def require_same_names(what: str, expected: Iterable[str], found: Iterable[str], remedy: str) -> None:
    """Strict both ways.

    Raises:
        UserError: names are missing or left over: how many, and the first few.
    """
    expected, found = set(expected), set(found)
    for fault, names in (("missing", expected - found), ("unknown", found - expected)):
        if names:
            first = ", ".join(sorted(names)[:3])
            raise UserError(
                f"{what} must hold exactly the model's {len(expected)} tensors: {len(names)} {fault} "
                f"({first}{', ...' if len(names) > 3 else ''}); {remedy}"
            )


def _fill(rule: Rule, layer: int, expert: int) -> Rule:
    def fill(text: str) -> str:
        return text.replace("{i}", str(layer)).replace("{e}", str(expert))

    if isinstance(rule, Rename):
        return Rename(fill(rule.megatron), fill(rule.hf), rule.shape)
    return ConcatRows(fill(rule.megatron), tuple(fill(source) for source in rule.sources), rule.shape)
