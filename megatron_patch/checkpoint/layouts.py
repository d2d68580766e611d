"""The two layouts of an export: which tensors it holds, which of them are the base's, and what its config.json says.

hybrid: the base's layers as they are, the DSA layers on top; exact at any length, for transformers.
native: every layer DSA, under DeepSeek-V3.2's names, which vLLM, vllm-ascend and SGLang serve. The base's layers get a
query latent that changes nothing (`native_weights`) and an indexer.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_patch.checkpoint.export_files import ARCHITECTURE, export_config, require_exportable
from megatron_patch.checkpoint.hf_mapping import hybrid_mapping, native_mapping, sizes
from megatron_patch.model.architecture import BASE_LAYERS, NATIVE_ARCHITECTURE, Architecture, DsaSettings, is_native

HYBRID, NATIVE = "hybrid", "native"
ARCHITECTURES = {HYBRID: ARCHITECTURE, NATIVE: NATIVE_ARCHITECTURE}
NATIVE_AUTO_MAP = {
    "AutoConfig": "configuration_deepseek_v2_dsa.DeepseekV32SoftmaxConfig",
    "AutoModel": "modeling_deepseek_v2_dsa.DeepseekV32Model",
    "AutoModelForCausalLM": f"modeling_deepseek_v2_dsa.{NATIVE_ARCHITECTURE}",
}
_QUERY = re.compile(r"(model\.layers\.\d+\.self_attn\.)q_proj\.weight")


@dataclass(frozen=True)
class ExportTensors:
    """What an export holds.

    Attributes:
        shapes: every tensor -> its shape.
        kept: each tensor of the base -> its name in the export, where it has the same bytes.
    """

    shapes: Mapping[str, tuple[int, ...]]
    kept: Mapping[str, str]


def layout_of(config: dict) -> str:
    """The layout of an export, from its parsed config.json; whatever is not native counts as hybrid."""
    return NATIVE if is_native(config) else HYBRID


def export_tensors(layout: str, arch: Architecture, pattern: tuple[str, ...], dsa: DsaSettings) -> ExportTensors:
    """The tensors of an export; `arch` is the base's, `pattern` the base's layers followed by the DSA layers.

    Raises:
        UserError: the pattern does not fit the base.
    """
    mapping = hybrid_mapping(arch, pattern)
    of_base = hybrid_mapping(arch, pattern[: arch.num_layers]).hf_names
    if layout == NATIVE:
        mapping = native_mapping(arch, len(pattern))
    return ExportTensors(
        shapes=mapping.shapes(sizes(arch, dsa)),
        kept={name: native_name(name) if layout == NATIVE else name for name in of_base},
    )


def native_name(name: str) -> str:
    """A base's tensor in the native layout: the plain query projection is what follows the latent there."""
    return _QUERY.sub(r"\1q_b_proj.weight", name)


def layout_config(
    layout: str, base: dict, arch: Architecture, pattern: tuple[str, ...], dsa: DsaSettings, q_rank: int
) -> dict:
    """The export's config.json; `base` is the base's, as parsed.

    Raises:
        UserError: as `export_config`.
    """
    if layout == NATIVE:
        return native_config(base, arch, pattern, dsa, q_rank)
    return export_config(base, pattern, dsa, q_rank)


def native_config(base: dict, arch: Architecture, pattern: tuple[str, ...], dsa: DsaSettings, q_rank: int) -> dict:
    """The base's config.json in DeepSeek-V3.2's terms, with every key explicit that an engine would guess otherwise.

    RoPE in the legacy form alone: some engines read no other, and YaRN would vanish without a word.
    """
    require_exportable(base)
    kept = {key: value for key, value in base.items() if key not in ("rope_parameters", "topk_method")}
    rope = arch.rope
    yarn = {
        "type": "yarn",
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_positions,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }
    return kept | {
        "architectures": [NATIVE_ARCHITECTURE],
        "auto_map": dict(NATIVE_AUTO_MAP),
        "model_type": "deepseek_v32",
        "num_hidden_layers": len(pattern),
        "num_nextn_predict_layers": 0,
        "q_lora_rank": q_rank,
        "index_topk": dsa.index_topk,
        "index_n_heads": dsa.index_n_heads,
        "index_head_dim": dsa.index_head_dim,
        BASE_LAYERS: arch.num_layers,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": arch.routed_scaling,
        "first_k_dense_replace": arch.first_dense_layers,
        "moe_layer_freq": 1,
        "num_key_value_heads": arch.num_heads,
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": yarn if rope.kind == "yarn" else None,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
