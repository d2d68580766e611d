"""Tiny random models of each family, made in transformers, and the same with experts taken out by hand."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS, TOP_K, VOCABULARY = 8, 2, 320
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
}
# top-k above every row: among equal index scores transformers' choice depends on the padding
INDEXER = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
FAMILIES = {
    "deepseek_v2": MLA | {"topk_method": "greedy"},
    "deepseek_v3": MLA | {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "deepseek_v32": MLA | INDEXER | {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5},
    "deepseek_v4": INDEXER
    | {
        "num_attention_heads": 2,
        "head_dim": 16,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "num_key_value_heads": 1,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "sliding_window": 16,
        "hc_mult": 2,
    },
}


def small_config(family: str, **changes):
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "n_shared_experts": 1,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(family, **(common | FAMILIES[family] | changes))
    config._experts_implementation = "eager"
    config._attn_implementation = "eager"
    return config


@torch.no_grad()
def small_model(family: str, seed: int = 0, **changes) -> nn.Module:
    """fp32, in evaluation mode; routers and biases spread enough that every expert is chosen by some token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(small_config(family, **changes)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
        elif name.endswith("tid2eid"):
            rows = [torch.randperm(EXPERTS, generator=generator)[: tensor.shape[1]] for _ in range(len(tensor))]
            tensor.copy_(torch.stack(rows))
        elif ".mlp." in name and tensor.ndim > 1:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return model


@torch.no_grad()
def pruned_by_hand(model: nn.Module, kept: dict[int, list[int]], tables: dict[int, torch.Tensor] | None = None) -> nn.Module:
    """A model with fewer experts, cut from the state of `model`; each layer keeps as many.

    Args:
        tables: hash layer -> its table in new ids.
    """
    (number,) = {len(experts) for experts in kept.values()}
    config = type(model.config)(**{**model.config.to_dict(), "n_routed_experts": number})
    config._experts_implementation = config._attn_implementation = "eager"
    small = type(model)(config).float().eval()
    state = {}
    for name, tensor in model.state_dict().items():
        for layer, experts in kept.items():
            if name.startswith(f"model.layers.{layer}.mlp.") and ".shared_experts." not in name:
                if name.endswith("tid2eid"):
                    tensor = tables[layer]
                else:
                    tensor = tensor[experts]
        state[name] = tensor.clone()
    small.load_state_dict(state)
    return small


def token_rows(*lengths: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
