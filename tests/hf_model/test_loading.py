"""Directory in, model out: nothing missing, nothing invented, and nothing else imported."""

import ast
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from megatron_patch import hf_model
from megatron_patch.hf_model.configuration_deepseek_v2_dsa import DeepseekV2DsaConfig
from tests.hf_model.hybrid import CODE, make_tiny_export, tokens

PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def test_loads_with_nothing_missing_or_left_over(export_dir):
    """Per-expert tensors are fused on the way in: unregistered custom code would get random experts, with a warning."""
    model, info = AutoModelForCausalLM.from_pretrained(export_dir, trust_remote_code=True, output_loading_info=True)
    assert {key: list(info[key]) for key in PROBLEMS} == {key: [] for key in PROBLEMS}
    assert type(model).__name__ == "DeepseekV2DsaForCausalLM"
    kinds = [type(layer.self_attn).__name__ for layer in model.model.layers]
    assert kinds == ["DeepseekV2Attention"] * 3 + ["DeepseekV2DsaAttention"] * 2
    stored = {}
    for file in export_dir.glob("*.safetensors"):
        stored |= load_file(file)
    experts = model.model.layers[4].mlp.experts
    for e in range(8):
        gate, up, down = (stored[f"model.layers.4.mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down"))
        assert torch.equal(experts.gate_up_proj[e], torch.cat([gate, up])) and torch.equal(experts.down_proj[e], down)


def test_auto_model_is_the_same_without_a_head(export_dir, model):
    inner, info = AutoModel.from_pretrained(
        export_dir, trust_remote_code=True, dtype=torch.float32, output_loading_info=True
    )
    assert type(inner).__name__ == "DeepseekV2DsaModel"
    assert (
        not info["missing_keys"] and not info["mismatched_keys"] and list(info["unexpected_keys"]) == ["lm_head.weight"]
    )
    ids = tokens(1, 30)
    with torch.no_grad():
        assert torch.equal(model.lm_head(inner.eval()(ids).last_hidden_state), model(ids).logits)


def test_saving_gives_the_same_tensors_back(model, export_dir, tmp_path):
    """Trainers write with save_pretrained: names per expert again, bit for bit, and the code goes along."""
    model.save_pretrained(tmp_path / "again")
    before, after = {}, {}
    for directory, state in ((export_dir, before), (tmp_path / "again", after)):
        for file in directory.glob("*.safetensors"):
            state |= load_file(file)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["dsa_layers"] == [3, 4] and config["dsa_index_topk"] == 8 and config["model_type"] == "deepseek_v2"
    assert all((tmp_path / "again" / file).is_file() for file in CODE)


def test_bf16_has_one_dtype(base_dir, tmp_path, load):
    """FSDP refuses a module of mixed dtypes, so neither k_norm, weights_proj nor the router may stay in fp32."""
    path = make_tiny_export(tmp_path / "hybrid", base_dir, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, "auto"):
        model = load(path, dtype=dtype)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert model(tokens(2, 30)).logits.isfinite().all()


def test_configuration_survives_and_is_not_mistaken(export_dir, tmp_path):
    """No top-level `index_topk`: engines take that name as "every layer is DSA"."""
    config = AutoConfig.from_pretrained(export_dir, trust_remote_code=True)
    assert type(config).__name__ == "DeepseekV2DsaConfig"
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    again = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    for c in (config, again):
        assert (c.dsa_layers, c.dsa_index_topk, c.dsa_index_n_heads, c.dsa_index_head_dim) == ([3, 4], 8, 4, 16)
        assert c.rope_parameters["mscale_all_dim"] == 0.707 and c.rope_parameters["rope_type"] == "yarn"
    assert not any(key.startswith("index_") for key in stored)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"dsa_layers": [2, 2]}, "distinct"),
        ({"dsa_layers": [4]}, "below num_hidden_layers"),
        ({"dsa_layers": [-1]}, "below num_hidden_layers"),
        ({"dsa_layers": [1], "dsa_index_topk": 0}, "at least 1"),
        ({"dsa_layers": [1], "dsa_index_head_dim": 32}, "must hold qk_rope_head_dim"),
    ],
)
def test_configuration_refuses(values, message):
    with pytest.raises(ValueError, match=message):
        DeepseekV2DsaConfig(num_hidden_layers=4, **values)


def test_without_dsa_layers_it_is_the_base(base_dir):
    """An empty list (a config that lost the key) means no DSA layer, never a guess."""
    assert DeepseekV2DsaConfig.from_pretrained(base_dir).dsa_layers == []


def test_code_imports_only_what_a_reader_has():
    """The files leave the package: torch, transformers (`deepseek_v2` at most) and each other, nothing else."""
    allowed = {"copy", "math", "collections.abc", "torch", "torch.nn.functional", "transformers"}
    allowed |= {"transformers.conversion_mapping", "transformers.modeling_utils"}
    allowed |= {"transformers.models.deepseek_v2.modeling_deepseek_v2"}
    for file in CODE:
        for node in ast.walk(ast.parse((Path(hf_model.__file__).parent / file).read_text())):
            if isinstance(node, ast.Import):
                assert {a.name for a in node.names} <= allowed
            elif isinstance(node, ast.ImportFrom):
                own_name = node.level == 1 and node.module == "configuration_deepseek_v2_dsa"
                assert own_name or (node.level == 0 and node.module in allowed), (file, node.module)


@pytest.mark.parametrize("kind", ["flash_attention_2", "flex_attention"])
def test_attention_without_a_mask_is_refused(export_dir, load, kind):
    """Neither takes an arbitrary mask: the selection would be lost without a word."""
    with pytest.raises((ValueError, ImportError), match="does not support"):
        load(export_dir, attn_implementation=kind)


def test_stock_class_on_the_directory_is_a_trap(export_dir, load):
    """Without trust_remote_code nothing raises: random q_proj, no indexer, other logits. Loaders must check for it."""
    stock, info = AutoModelForCausalLM.from_pretrained(export_dir, dtype=torch.float32, output_loading_info=True)
    assert type(stock).__name__ == "DeepseekV2ForCausalLM"
    assert {f"model.layers.{i}.self_attn.q_proj.weight" for i in (3, 4)} == set(info["missing_keys"])
    assert any("indexer" in key for key in info["unexpected_keys"])
    ids = tokens(1, 40)
    with torch.no_grad():
        assert (stock.eval()(ids).logits - load(export_dir)(ids).logits).abs().max() > 0.1
