"""The small base: its published-form configuration, its model in transformers, and its directory on disk."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

SHARDS = 2
EMBEDDING_STD = 1.0
MARK = 4.0  # first dimension of every token's embedding: what a query or key that is the same for all tokens can read
LOOK_BACK = 1.5  # how sharply the first head starts to look at the token before
OUTPUT_SCALE = 0.35  # 1/sqrt(2 * layers): each block starts as a small correction of the stream
ROPE_SCALING = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def published_config(vocab_size: int, bos_id: int, eos_id: int) -> dict:
    """`config.json` with every structural feature of DeepSeek-V2-Lite, in the form that it was published in.

    Dense first layer, routed and shared experts, softmax greedy routing without renormalisation, plain `q_proj`,
    YaRN by the legacy keys `rope_theta` and `rope_scaling` (some engines read only those), untied head.
    """
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 352,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "rope_scaling": dict(ROPE_SCALING),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": "float32",
    }


def build_model(config: dict) -> torch.nn.Module:
    """transformers' own `DeepseekV2ForCausalLM` (fp32, eager experts: the fastest on a CPU) for a published config."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    keys = ("architectures", "torch_dtype", "rope_scaling", "rope_theta", "model_type")
    settings = DeepseekV2Config(
        **{key: value for key, value in config.items() if key not in keys},
        rope_parameters={
            **{key: value for key, value in config["rope_scaling"].items() if key != "type"},
            "rope_type": config["rope_scaling"]["type"],
            "rope_theta": config["rope_theta"],
        },
    )
    settings._experts_implementation = "eager"
    return DeepseekV2ForCausalLM(settings)


@torch.no_grad()
def initialize(model: torch.nn.Module, seed: int) -> None:
    """Fresh weights from `seed`: matrices with a standard deviation of 1/sqrt(inputs), smaller where a block writes.

    transformers' 0.02 suits a hidden size of thousands; at 128 attention starts nearly flat and recall is learned late.
    One head of the first layer looks back from the start, see `_look_back`.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:  # experts are [E, outputs, inputs], all others [outputs, inputs]
            std = EMBEDDING_STD if "embed_tokens" in name else parameter.shape[-1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                std *= OUTPUT_SCALE
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        else:
            parameter.fill_(1.0)
    _look_back(model)


@torch.no_grad()
def _look_back(model: torch.nn.Module) -> None:
    """Let head 0 of layer 0 start by attending to the token before, whatever the tokens are.

    Recall is built on such a head (induction, Olsson et al., arXiv 2209.11895), and with weights that start at random it
    appears after some hundred steps, or not in a demo's training at all. Starting a head near what trained models have
    is mimetic initialisation (Trockman and Kolter, arXiv 2305.09828). Query and key read the embeddings' mark alone;
    RoPE turns pair i of a key at distance d by -w_i*d against the query's, so a query turned ahead by -w_i fits d = 1.
    """
    config, attention = model.config, model.model.layers[0].self_attn
    rope, frequency = config.qk_rope_head_dim, model.model.rotary_emb.inv_freq
    model.model.embed_tokens.weight[:, 0] = MARK
    head = attention.q_proj.weight[: config.qk_nope_head_dim + rope]  # rows of head 0: content, then rotated dims
    shared_key = attention.kv_a_proj_with_mqa.weight[-rope:]
    head.zero_()
    shared_key.zero_()
    head[-rope:, 0] = LOOK_BACK * torch.stack([frequency.cos(), -frequency.sin()], dim=-1).flatten()
    shared_key[::2, 0] = LOOK_BACK


def per_expert_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """The weights under their published names: transformers keeps a layer's experts in two 3-D tensors, split here.

    `experts.gate_up_proj` [E, 2*F, H] holds gate above up; `experts.down_proj` is [E, H, F].
    """
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        prefix, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for e, fused in enumerate(tensor):
                gate, up = fused.chunk(2)
                state[f"{prefix}.{e}.gate_proj.weight"] = gate.clone()
                state[f"{prefix}.{e}.up_proj.weight"] = up.clone()
        elif leaf == "down_proj":
            for e, down in enumerate(tensor):
                state[f"{prefix}.{e}.down_proj.weight"] = down.clone()
        else:
            state[name] = tensor.clone()
    return state


def write_weights(directory: Path, state: dict[str, Tensor], shards: int = SHARDS) -> None:
    """Write `model-0000x-of-0000n.safetensors`, cut by size in the model's order, and the index."""
    total = sum(tensor.nbytes for tensor in state.values())
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    done = 0
    for name, tensor in state.items():
        parts[min(shards - 1, done * shards // total)][name] = tensor.contiguous()
        done += tensor.nbytes
    weight_map = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def write_base(directory: Path, model: torch.nn.Module, config: dict) -> None:
    """Write config, generation config and sharded weights. The tokenizer is written by `write_tokenizer`."""
    _write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    _write_json(
        directory / "generation_config.json", {"_from_model_config": True, **ids, "pad_token_id": ids["eos_token_id"]}
    )
    write_weights(directory, per_expert_state(model))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
