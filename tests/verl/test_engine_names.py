"""Every tensor that the trainer hands over has one place in the engines, and every place of the engines is filled.

In verl trainer and engine exchange tensors by name. The engines' rules are written here as tables, from reading vLLM 0.32.0
(`DeepseekV2ForCausalLM.load_weights`, which `DeepseekV32ForCausalLM` uses) and SGLang (`deepseek_weight_loader.py`); both match
by SUBSTRING, in order, so that a new name that merely contains an old one would go astray. vllm-ascend loads through vLLM's classes.
The trainer's names are those of the directory's index: test_actor_update.py compares the two.
"""

import json
import re
from collections import defaultdict

import pytest

# substring -> (what replaces it, its part); tensors of experts excepted
COMMON = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
VLLM = COMMON | {
    "wk": ("wk_weights_proj", 0),
    "weights_proj": ("wk_weights_proj", 1),
    "q_a_proj": ("fused_qkv_a_proj", 0),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj", 1),
}
SGLANG = COMMON | {"q_a_proj": ("fused_qkv_a_proj_with_mqa", 0), "kv_a_proj_with_mqa": ("fused_qkv_a_proj_with_mqa", 1)}
EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
EXPERT_PARAMETER = {"gate": "w13_weight", "up": "w13_weight", "down": "w2_weight"}
# SGLang fuses wk and weights_proj on CUDA, and does not on NPUs; its loader takes the two names either way.
INDEXER = {
    "vllm": {"wq_b.weight": 1, "wk_weights_proj.weight": 2, "k_norm.weight": 1, "k_norm.bias": 1},
    "sglang": {"wq_b.weight": 1, "wk.weight": 1, "weights_proj.weight": 1, "k_norm.weight": 1, "k_norm.bias": 1},
}
FUSED_A = {"vllm": "fused_qkv_a_proj", "sglang": "fused_qkv_a_proj_with_mqa"}
RULES = {"vllm": VLLM, "sglang": SGLANG}


def resolve(name: str, rules: dict) -> tuple[str, object]:
    """(the engine's parameter, the part of it) of a tensor."""
    expert = EXPERT.fullmatch(name)
    if expert:
        prefix, number, part = expert.groups()
        return prefix + EXPERT_PARAMETER[part], (int(number), part)
    found = [key for key in rules if key in name]
    assert len(found) <= 1, f"{name} contains {found}: the first in the engine's table would win"
    if not found:
        return name, "all"
    parameter, part = rules[found[0]]
    return name.replace(found[0], parameter), part


def parameters(config: dict, engine: str) -> dict[str, int]:
    """Each parameter that the engine builds for this configuration, and how many tensors fill it."""
    wanted = {"model.embed_tokens.weight": 1, "model.norm.weight": 1, "lm_head.weight": 1}
    for i in range(config["num_hidden_layers"]):
        layer, attention = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        wanted |= {f"{layer}{name}_layernorm.weight": 1 for name in ("input", "post_attention")}
        wanted[f"{attention}{FUSED_A[engine]}.weight"] = 2
        wanted |= {f"{attention}{name}.weight": 1 for name in ("q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj")}  # fmt: skip
        wanted |= {f"{attention}indexer.{name}": parts for name, parts in INDEXER[engine].items()}
        moe = i >= config["first_k_dense_replace"] and i % config["moe_layer_freq"] == 0
        dense = f"{layer}mlp.shared_experts." if moe else f"{layer}mlp."
        wanted |= {f"{dense}gate_up_proj.weight": 2, f"{dense}down_proj.weight": 1}
        if moe:
            wanted[f"{layer}mlp.gate.weight"] = 1  # and a bias where topk_method is noaux_tc
            wanted |= {f"{layer}mlp.experts.w13_weight": 2 * config["n_routed_experts"], f"{layer}mlp.experts.w2_weight": config["n_routed_experts"]}  # fmt: skip
    return wanted


@pytest.fixture(scope="module")
def config(native):
    return json.loads((native / "config.json").read_text())


@pytest.fixture(scope="module")
def names(native):
    return list(json.loads((native / "model.safetensors.index.json").read_text())["weight_map"])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_tensor_fills_one_place_and_every_place_is_filled(names, config, engine):
    filled = defaultdict(set)
    for name in names:
        parameter, part = resolve(name, RULES[engine])
        assert part not in filled[parameter], f"{name} comes second to {parameter}"
        filled[parameter].add(part)
    assert {name: len(parts) for name, parts in filled.items()} == parameters(config, engine)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("wrong", ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.self_attn.indexer.wkv.weight"])  # fmt: skip
def test_the_table_refuses_what_the_engines_have_no_place_for(names, config, engine, wrong):
    """A hybrid's plain query, transformers' fused experts, and a name that merely contains another."""
    parameter, _ = resolve(wrong, RULES[engine])
    assert parameter not in parameters(config, engine)


def test_the_configuration_asks_for_no_parameter_that_is_not_there(config):
    """A router bias would be left at whatever the engine allocates; predictor layers would be looked for."""
    assert config["topk_method"] == "greedy" and config["num_nextn_predict_layers"] == 0 and config["n_group"] == 1
