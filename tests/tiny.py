"""A tiny random base in the published DeepSeek-V2-Lite layout: every structural feature, seconds to make."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_cache": True,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
    "{% elif m['role'] == 'system' %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)  # DeepSeek-V2-Lite-Chat's form


def tiny_state(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights with the published names, fp32. Norm weights differ from 1, so that a lost norm shows."""
    g = torch.Generator().manual_seed(seed)
    h, heads = config["hidden_size"], config["num_attention_heads"]
    qk = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    state: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, cols: int, std: float = 0.08) -> None:
        state[name + ".weight"] = torch.randn(rows, cols, generator=g) * std

    def norm(name: str, size: int) -> None:
        state[name + ".weight"] = 0.5 + torch.rand(size, generator=g)

    def mlp(name: str, size: int) -> None:
        matrix(f"{name}.gate_proj", size, h)
        matrix(f"{name}.up_proj", size, h)
        matrix(f"{name}.down_proj", h, size)

    matrix("model.embed_tokens", config["vocab_size"], h, 0.05)  # a small variance, at which a wrong eps shows
    for i in range(config["num_hidden_layers"]):
        layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        norm(f"{layer}.input_layernorm", h)
        norm(f"{layer}.post_attention_layernorm", h)
        matrix(f"{attention}.q_proj", heads * qk, h, 0.15)
        matrix(f"{attention}.kv_a_proj_with_mqa", config["kv_lora_rank"] + config["qk_rope_head_dim"], h, 0.15)
        norm(f"{attention}.kv_a_layernorm", config["kv_lora_rank"])
        matrix(
            f"{attention}.kv_b_proj",
            heads * (config["qk_nope_head_dim"] + config["v_head_dim"]),
            config["kv_lora_rank"],
        )
        matrix(f"{attention}.o_proj", h, heads * config["v_head_dim"])
        if i < config["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        matrix(f"{layer}.mlp.gate", config["n_routed_experts"], h, 0.15)
        for e in range(config["n_routed_experts"]):
            mlp(f"{layer}.mlp.experts.{e}", config["moe_intermediate_size"])
        mlp(f"{layer}.mlp.shared_experts", config["moe_intermediate_size"] * config["n_shared_experts"])
    norm("model.norm", h)
    matrix("lm_head", config["vocab_size"], h)
    return state


def make_tiny_base(
    path: str | Path, *, dtype: torch.dtype = torch.float32, shards: int = 2, seed: int = 0, **config_overrides
) -> Path:
    """Write the directory; `shards=1` writes `model.safetensors` without an index, as transformers does."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "torch_dtype": str(dtype).removeprefix("torch."), **config_overrides}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    state = {name: tensor.to(dtype).contiguous() for name, tensor in tiny_state(config, seed).items()}
    if shards == 1:
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        return path
    names, weight_map = sorted(state), {}
    for s in range(shards):  # round robin: experts of a layer end up in different shards
        file = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in names[s::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def make_tiny_tokenizer(path: str | Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A byte-level tokenizer (<pad> 0, <bos> 1, <eos> 2, then 256 bytes: 259 ids) in `path`, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    fast.save_pretrained(path)
    return Path(path)
