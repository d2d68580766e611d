"""Small random checkpoints of every family in the native key layout, and statistics for them.

The weights of the loadable ones are those of a transformers model, renamed by a table of this file: not the package's.
"""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_patch.pruning.statistics import SourceStatistics, Statistics, model_sha256
from tests import tiny

FAMILIES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4")
EXPERTS, TOP_K = 16, 3

_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "topk_method": "noaux_tc",
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": TOP_K,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "deepseek_v2": {**tiny.CONFIG, "n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K},
    "deepseek_v3": _V3,
    "deepseek_v32": {
        **_V3,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_topk": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
    },
    "deepseek_v4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 96,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 1,
        "num_hash_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "num_experts_per_tok": TOP_K,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "compress_ratios": [0, 4, 128, 4, 0],  # one more than the layers: the MTP layer's
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
        "sliding_window": 8,
        "hc_mult": 2,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
    },
}
# transformers' names -> DeepSeek-V4's own, in this order.
_V4_NATIVE = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.", "hc_head_"),
    (r"hc_head_hc_", "hc_head_"),
    (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.attn_hc\.", ".hc_attn_"),
    (r"\.ffn_hc\.", ".hc_ffn_"),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.sinks", ".attn_sink"),
    (r"compressor\.kv_norm\.", "compressor.norm."),
    (r"\.position_bias", ".ape"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.self_attn\.q_a_proj\.", ".self_attn.wq_a."),
    (r"\.self_attn\.q_b_proj\.", ".self_attn.wq_b."),
    (r"\.kv_proj\.", ".wkv."),
    (r"compressor\.gate_proj\.", "compressor.wgate."),
    (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."),
    (r"\.self_attn\.", ".attn."),
    (r"\.gate\.e_score_correction_bias", ".gate.bias"),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
)


def state_of(config: dict, seed: int = 0) -> dict[str, Tensor]:
    """Weights by native name, fp32, MTP not included."""
    if config["model_type"] == "deepseek_v2":
        return tiny.tiny_state(config, seed)
    import transformers

    name = config["architectures"][0]
    model_config = getattr(transformers, name.replace("ForCausalLM", "Config"))(**json.loads(json.dumps(config)))
    model = getattr(transformers, name)(model_config)
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        if key.endswith("e_score_correction_bias"):  # large and negative ones occur: 0 in a mask would win over these
            tensor = torch.randn(tensor.shape, generator=generator) - 1
        elif key.endswith("tid2eid"):
            tensor = (
                torch.rand(tensor.shape[0], config["n_routed_experts"], generator=generator)
                .topk(tensor.shape[1])
                .indices
            )
        elif tensor.ndim > 1:
            tensor = torch.randn(tensor.shape, generator=generator) * (1.0 if key.endswith("gate.weight") else 0.2)
        state |= _apart(key, tensor.clone())
    if config["model_type"] == "deepseek_v4":
        state = {_v4_name(key): tensor for key, tensor in state.items()}
    return state


def _apart(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """transformers holds the experts of a layer in one tensor, checkpoints hold each one's."""
    head, _, leaf = key.rpartition(".")
    if leaf == "gate_up_proj":
        halves = zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1))
        return {f"{head}.{e}.{n}.weight": half[e].clone() for n, half in halves for e in range(len(tensor))}
    if leaf == "down_proj":
        return {f"{head}.{e}.down_proj.weight": tensor[e].clone() for e in range(len(tensor))}
    return {key: tensor}


def _v4_name(key: str) -> str:
    for pattern, replacement in _V4_NATIVE:
        key = re.sub(pattern, replacement, key)
    return key


def with_mtp(state: dict[str, Tensor], config: dict, seed: int = 1) -> dict[str, Tensor]:
    """An MTP layer added: a copy of the last layer with other weights, and what MTP layers have besides."""
    generator = torch.Generator().manual_seed(seed)
    last, v4 = config["num_hidden_layers"] - 1, config["model_type"] == "deepseek_v4"
    prefix = f"layers.{last}." if v4 else f"model.layers.{last}."
    mtp = "mtp.0." if v4 else f"model.layers.{last + 1}."
    added = {mtp + key.removeprefix(prefix): tensor.clone() for key, tensor in state.items() if key.startswith(prefix)}
    for key in [key for key in added if re.search(r"experts\.\d|gate\.weight", key)]:
        added[key] = torch.randn(added[key].shape, generator=generator)
    hidden = config["hidden_size"]
    extra = (
        ("enorm.weight", "hnorm.weight", "e_proj.weight") if v4 else ("enorm.weight", "hnorm.weight", "eh_proj.weight")
    )
    added |= {mtp + name: torch.rand(hidden, hidden if "proj" in name else 1, generator=generator) for name in extra}
    return state | added


def quantised(state: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    """Routed experts as random FP8 with a scale per 128x128 block ("fp8"), or packed FP4 with an e8m0 scale per 32 ("fp4")."""
    generator = torch.Generator().manual_seed(2)
    result = {}
    for key, tensor in state.items():
        if not re.search(r"\.experts\.\d+\..*\.weight$", key):
            result[key] = tensor
            continue
        rows, columns = tensor.shape
        if how == "fp8":
            result[key] = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
            scale = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator)
            v4 = key.endswith((".w1.weight", ".w2.weight", ".w3.weight"))
            result[key.removesuffix("weight") + "scale" if v4 else key + "_scale_inv"] = scale
        else:
            result[key] = torch.randint(-128, 128, (rows, -(-columns // 2)), dtype=torch.int8, generator=generator)
            scale = torch.randint(100, 140, (rows, -(-columns // 32)), dtype=torch.uint8, generator=generator)
            result[key.removesuffix("weight") + "scale"] = scale.view(torch.float8_e8m0fnu)
    return result


def write(path: Path, config: dict, state: dict[str, Tensor], shards: int = 3) -> Path:
    """The directory: weights round robin over shards, all scales in a shard of their own, and files around them."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "generation_config.json").write_text("{}\n")
    (path / "README.md").write_text("a model\n")
    (path / "encoding").mkdir(exist_ok=True)
    (path / "encoding" / "chat.py").write_text("x = 1\n")
    if shards == 1:
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        return path
    scales = [name for name in state if name.endswith(("scale_inv", ".scale")) and "experts." in name]
    names = sorted(set(state) - set(scales))
    parts = [names[i::shards] for i in range(shards)] + ([scales] if scales else [])
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file({name: state[name].contiguous() for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in state.values())
    index = {"metadata": {"total_size": total, "made_by": "test"}, "weight_map": dict(sorted(weight_map.items()))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return path


def make(
    path: Path,
    model_type: str,
    *,
    mtp: bool = True,
    quantise: str | None = None,
    shards: int = 3,
    seed: int = 0,
    prefix: str = "",
    **changes,
) -> Path:
    """A small checkpoint; `prefix="model."` names DeepSeek-V4's tensors as copies in circulation do."""
    config = {**CONFIGS[model_type], **changes}
    if quantise == "fp8":
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    state = state_of(config, seed)
    if mtp and config.get("num_nextn_predict_layers"):
        state = with_mtp(state, config)
    if quantise:
        state = quantised(state, quantise)
    return write(Path(path), config, {prefix + name: tensor for name, tensor in state.items()}, shards)


def make_statistics(
    model: Path, file: Path, *, seed: int = 0, tokens: int = 400, layers: tuple[int, ...] | None = None
) -> Path:
    """Skewed random statistics of two sources, "code" and "chat"; a token's experts are distinct."""
    config = json.loads((model / "config.json").read_text())
    first = config.get("first_k_dense_replace", 0)
    layers = tuple(range(first, config["num_hidden_layers"])) if layers is None else layers
    experts, top_k = config["n_routed_experts"], config["num_experts_per_tok"]
    generator = torch.Generator().manual_seed(seed)
    sources = {}
    for name in ("code", "chat"):
        count = torch.zeros(len(layers), experts, dtype=torch.int64)
        for row in range(len(layers)):
            liking = torch.randn(experts, generator=generator) * 2
            liking[torch.randint(experts, (1,), generator=generator)] = -100  # one is never chosen
            noise = -torch.rand(tokens, experts, generator=generator).log().neg().log()
            count[row] = torch.bincount((liking + noise).topk(top_k).indices.reshape(-1), minlength=experts)
        gate = count * torch.rand(count.shape, generator=generator, dtype=torch.float64)
        norm = gate * torch.rand(count.shape, generator=generator, dtype=torch.float64)
        sources[name] = SourceStatistics(tokens, count, gate, norm, norm**2, norm / count.clamp(min=1))
    Statistics(config["model_type"], model_sha256(model), layers, experts, top_k, sources).save(file)
    return file
