"""The judge on DeepSeek-V3.2's router: sigmoid, selection bias, groups. transformers' own class is the side."""

import json

import pytest
import torch

from megatron_patch.diagnosis.parity.checkpoint_side import dump_checkpoint
from megatron_patch.diagnosis.parity.parity import examine
from megatron_patch.diagnosis.parity.planted import planted
from megatron_patch.faults import Fault

deepseek_v32 = pytest.importorskip("transformers.models.deepseek_v32")


@pytest.fixture(scope="module")
def v32(tmp_path_factory):
    """(model, directory) of a small DeepSeek-V3.2 with random weights and a selection bias that matters."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    rope = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0}
    config = DeepseekV32Config(
        vocab_size=200, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
        n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True, first_k_dense_replace=1,
        q_lora_rank=48, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        index_topk=64, index_n_heads=4, index_head_dim=16, rope_parameters=rope,
    )  # fmt: skip
    config._experts_implementation = "eager"
    config._attn_implementation = "eager"
    model = DeepseekV32ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                value.copy_(torch.randn(value.shape, generator=generator))
            elif value.ndim >= 2:
                value.copy_(torch.randn(value.shape, generator=generator) * value.shape[-1] ** -0.5)
    path = tmp_path_factory.mktemp("v32")
    model.save_pretrained(path)
    published = json.loads((path / "config.json").read_text())
    assert published["model_type"] == "deepseek_v32"
    return model, path


def side(model, path, name):
    tokens = torch.randint(0, 200, (48,), generator=torch.Generator().manual_seed(3))
    dump = dump_checkpoint(
        model, path, tokens, torch.tensor([0, 48], dtype=torch.int32), topk=64, environment={}, dtype="float32"
    )
    dump.side = name
    return dump


def test_transformers_own_class_agrees_with_the_judge(v32):
    model, path = v32
    report = examine(side(model, path, "A"), side(model, path, "B"), path, progress=False).report
    assert report["first_divergence"] is None and report["suspected"] == []
    assert {row["module"] for row in report["modules"] if row["layer"] == 2} >= {"attention", "router", "experts", "shared"}


def test_a_missing_selection_bias_is_named(v32):
    model, path = v32
    clean = side(model, path, "A")
    with planted(model, Fault.ROUTER_BIAS_MISSING):
        wrong = side(model, path, "B")
    report = examine(clean, wrong, path, progress=False).report
    assert report["suspected"][0]["fault"] == Fault.ROUTER_BIAS_MISSING
    assert report["first_divergence"] == report["first_divergence"] | {"module": "router", "side": "B"}


def test_softmax_in_its_place_is_not_taken_for_the_bias(v32):
    """Another score function with the same bias: no known fault of a sigmoid router, so no name."""
    model, path = v32
    clean, gate = side(model, path, "A"), model.model.layers[2].mlp.gate
    forward = gate.forward

    def softmax(x):
        logits, _, chosen = forward(x)
        return logits, logits.softmax(-1).gather(-1, chosen), chosen

    gate.forward = softmax
    try:
        wrong = side(model, path, "B")
    finally:
        del gate.forward
    report = examine(clean, wrong, path, progress=False).report
    assert report["first_divergence"]["module"] == "router" and report["suspected"] == []
