"""A whole DeepSeek-V3.2 model, pruned or not, planned for training that moves everything (reinforcement learning).

Upcycling never trains such a model; the pruner makes one, and it has to fit the machines of the team that trains it. Read from
config.json alone; multi-token prediction is left out, as the pruner does by default.
"""

from dataclasses import dataclass
from pathlib import Path

from megatron_patch.errors import UserError
from megatron_patch.model.architecture import SIZE_KEYS, Architecture, DsaSettings, Rope, is_native, read_config
from megatron_patch.planning.parameters import Part, Split

MODEL_TYPES = ("deepseek_v32", "deepseek_v3")  # the latter without an indexer
_SIZES = {**SIZE_KEYS, "q_lora_rank": "q_lora_rank"}
_INDEX_SIZES = ("index_topk", "index_n_heads", "index_head_dim")


@dataclass(frozen=True, kw_only=True)
class DeepseekV32(Architecture):
    """`Architecture` with a query latent of its own, and an indexer in every layer (or in none)."""

    q_lora_rank: int
    indexed: bool

    @property
    def dsa_q_rank(self) -> int:
        return self.q_lora_rank

    @property
    def trains_whole(self) -> bool:
        return True


def is_deepseek_v32(config: dict) -> bool:
    """Whether a parsed config.json is of this family; an export of ours in the native layout is not."""
    return config.get("model_type") in MODEL_TYPES and not is_native(config)


def read_deepseek_v32(path: str | Path) -> tuple[DeepseekV32, DsaSettings]:
    """(sizes of the model, sizes of its indexer).

    Raises:
        UserError: a size is missing or no whole number.
    """
    config = read_config(path)
    sizes = {field: config.get(key) for field, key in _SIZES.items()}
    index = {name: config[name] for name in _INDEX_SIZES if config.get(name) is not None}
    given = {key: sizes[field] for field, key in _SIZES.items()} | index
    wrong = {key: value for key, value in given.items() if type(value) is not int or value < (key != "first_k_dense_replace")}
    if wrong:
        raise UserError(f"config.json must name the sizes of the model: {path} has {wrong}; fetch the file again")
    if sizes["experts_per_token"] > sizes["num_experts"]:
        both = f"{sizes['experts_per_token']} and {sizes['num_experts']}"
        raise UserError(f"num_experts_per_tok must not exceed n_routed_experts: {path} has {both}; fetch the file again")
    # Positions and RoPE cost nothing that is counted.
    arch = DeepseekV32(**sizes, norm_eps=1e-6, max_positions=0, rope=Rope(), indexed="index_topk" in index)
    return arch, DsaSettings(**index)


def whole_parts(arch: DeepseekV32, dsa: DsaSettings) -> list[Part]:
    """Everything that the model holds, bottom to top; all of it trains."""
    table, hidden, heads = arch.vocab_size * arch.hidden_size, arch.hidden_size, arch.num_heads
    found = [Part("embedding", table, "tensor", True, -1, hidden)]

    def add(layer: int, name: str, count: int, split: Split, active: int | None = None) -> None:
        found.append(Part(name, count, split, True, layer, count if active is None else active))

    for layer in range(arch.num_layers):
        add(layer, "norms", 2 * hidden + arch.kv_lora_rank + arch.q_lora_rank, "whole")
        add(layer, "attention", hidden * (arch.kv_lora_rank + arch.qk_rope_head_dim + arch.q_lora_rank), "whole")
        add(layer, "attention", arch.kv_lora_rank * heads * (arch.qk_nope_head_dim + arch.v_head_dim), "tensor")
        add(layer, "attention", arch.q_lora_rank * heads * arch.qk_head_dim + heads * arch.v_head_dim * hidden, "tensor")
        if arch.indexed:
            indexer = arch.q_lora_rank * dsa.index_n_heads * dsa.index_head_dim
            indexer += hidden * dsa.index_head_dim + 2 * dsa.index_head_dim + hidden * dsa.index_n_heads
            add(layer, "indexer", indexer, "whole")
        if not arch.is_moe(layer):
            add(layer, "dense FFN", 3 * hidden * arch.ffn_size, "tensor")
            continue
        expert = 3 * hidden * arch.moe_ffn_size
        add(layer, "router", arch.num_experts * (hidden + 1), "whole")  # and the selection bias
        add(layer, "routed experts", arch.num_experts * expert, "experts", arch.experts_per_token * expert)
        add(layer, "shared experts", arch.num_shared_experts * expert, "tensor")
    add(arch.num_layers, "norms", hidden, "whole")
    add(arch.num_layers, "head", table, "tensor")
    return found
