"""A model of random weights with an optimizer around it, for benchmarks: the same objects that a run builds, without files."""

import math

import torch

# DeepSeek-V2-Lite's form; a benchmark replaces the sizes.
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "q_lora_rank": None,
    "hidden_act": "silu",
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "max_position_embeddings": 163840,
}
# Six layers that are small enough for two cores, and V2-Lite itself.
SMALL = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "moe_intermediate_size": 256, "num_hidden_layers": 6,
    "num_attention_heads": 8, "n_routed_experts": 64, "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}  # fmt: skip
V2_LITE = {
    "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "n_routed_experts": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}  # fmt: skip


def architecture(sizes: dict):
    """What a base of these sizes is."""
    from megatron_patch.model.architecture import architecture_from_config

    return architecture_from_config(CONFIG | sizes)


def build(sizes: dict, dsa_layers: int, dsa: dict, *, train_all: bool = False, dtype: torch.dtype = torch.float32, backend: str = "auto"):
    """(architecture, pattern, DSA sizes, model, DSA state, device): every weight drawn, the base frozen unless `train_all`."""
    from megatron_patch.devices.device import activate, initialize_distributed

    device = activate()
    initialize_distributed(device, seed=0)
    from megatron_patch.model.architecture import DsaSettings
    from megatron_patch.model.builder import BuildSettings, build_model
    from megatron_patch.model.freeze import freeze_base
    from megatron_patch.model.layer_pattern import appended_pattern
    from megatron_patch.ops.backends import choose_backend

    arch = architecture(sizes)
    pattern, settings = appended_pattern(arch.num_layers, dsa_layers), DsaSettings(**dsa)
    chosen = choose_backend(backend, device.torch_device.type)
    model, state = build_model(arch, pattern, settings, BuildSettings(dtype=dtype), chosen)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:  # drawn in place: a bf16 model never exists in fp32
                parameter.normal_(0.0, 0.5 / math.sqrt(parameter.size(1)), generator=generator)
    if not train_all:
        freeze_base(model, pattern)
    return arch, pattern, settings, model.to(device.torch_device), state, device


def with_optimizer(model, *, bf16: bool = False):
    """(DDP around the model, AdamW of what trains)."""
    from megatron_patch.config import OptimizerSettings
    from megatron_patch.training.optimizer import build_optimizer, wrap_ddp

    ddp = wrap_ddp(model, False)
    return ddp, build_optimizer(ddp, OptimizerSettings(lr=1e-4), bf16=bf16, use_distributed_optimizer=False)


def documents(vocabulary: int, lengths: list[int]):
    """A micro-batch of random tokens, each of which is supervised."""
    from megatron_patch.data.batch import Row, collate

    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in lengths:
        tokens = torch.randint(3, vocabulary, (length + 1,), generator=generator)
        rows.append((Row(tokens[:-1], tokens[1:], torch.ones(length)), True))
    return collate(rows)
