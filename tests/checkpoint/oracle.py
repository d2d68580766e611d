"""transformers' own DeepSeek-V3.2 with V2's routing: the native layout's judge, of which nothing is ours but the router."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Experts, DeepseekV32TopkRouter


def _softmax_greedy(router: DeepseekV32TopkRouter, hidden: torch.Tensor):
    """DeepSeek-V2's gate (scoring_func softmax, topk_method greedy, norm_topk_prob false)."""
    logits = F.linear(hidden.view(-1, router.hidden_dim).float(), router.weight.float())
    weights, experts = logits.softmax(-1).topk(router.top_k, dim=-1)
    return logits, weights * router.routed_scaling_factor, experts


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory's safetensors files."""
    state: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        state |= load_file(file)
    return state


def oracle(directory: Path) -> DeepseekV32ForCausalLM:
    """The stock class, filled by name from a native export in fp32 (only the experts are stacked), routing by softmax."""
    config = json.loads((directory / "config.json").read_text())
    for key in ("auto_map", "architectures", "model_type"):
        del config[key]
    model = DeepseekV32ForCausalLM(DeepseekV32Config(**config, attn_implementation="eager")).float().eval()
    state = {name: tensor.float() for name, tensor in tensors_of(directory).items()}
    for name, module in model.named_modules():
        if isinstance(module, DeepseekV32TopkRouter):
            module.forward = _softmax_greedy.__get__(module)
            state[f"{name}.e_score_correction_bias"] = torch.zeros_like(module.e_score_correction_bias)
        if isinstance(module, DeepseekV32Experts):
            gate, up, down = (
                torch.stack([state.pop(f"{name}.{e}.{part}_proj.weight") for e in range(module.num_experts)])
                for part in ("gate", "up", "down")
            )
            state |= {f"{name}.gate_up_proj": torch.cat([gate, up], 1), f"{name}.down_proj": down}
    model.load_state_dict(state, strict=True)
    return model
