"""What stands in a native export: config.json, the base's bytes, the label, and how `check` notices damage."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patch.checkpoint.check import check
from megatron_patch.checkpoint.export import export
from megatron_patch.errors import UserError
from megatron_patch.hf_model.configuration_deepseek_v2_dsa import DeepseekV32SoftmaxConfig
from tests.checkpoint.oracle import tensors_of
from tests.checkpoint.runs import write_run
from tests.checkpoint.test_check import edit_json, edit_tensors, forge_manifest
from tests.checkpoint.test_native import ADDITIONS, load
from tests.tiny import CONFIG, make_tiny_base, make_tiny_tokenizer

# Written by hand: what an engine reads, and would guess wrongly if it were absent.
ENGINE_KEYS = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_hidden_layers": 5,
    "q_lora_rank": 64,
    "index_topk": 16,
    "index_n_heads": 3,
    "index_head_dim": 16,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "rope_theta": 10000,
    "rope_scaling": CONFIG["rope_scaling"],
}


@pytest.mark.parametrize("form", ["legacy", "transformers 5"])
def test_config_has_every_key_of_the_engines(tmp_path, form):
    """Also where the base is silent about routing, or has RoPE in the new form, which some engines do not read."""
    base = make_tiny_tokenizer(make_tiny_base(tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    for key in ("scoring_func", "topk_method", "norm_topk_prob", "moe_layer_freq", "routed_scaling_factor"):
        del config[key]
    config |= {"n_group": None, "topk_group": None}
    if form != "legacy":
        rope = config.pop("rope_scaling")
        config["rope_parameters"] = rope | {"rope_type": rope.pop("type"), "rope_theta": config.pop("rope_theta")}
    (base / "config.json").write_text(json.dumps(config))
    export(write_run(tmp_path / "save", base), base, tmp_path / "out", layout="native", progress=False)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: written.get(key) for key in ENGINE_KEYS} == ENGINE_KEYS
    assert "rope_parameters" not in written and not any(key.startswith("dsa_index") for key in written)
    assert check(tmp_path / "out", base) == 0


def test_base_tensors_are_the_same_bytes(base, native):
    before, after = tensors_of(base), tensors_of(native)
    for name, tensor in before.items():
        target = name.replace("self_attn.q_proj", "self_attn.q_b_proj")
        assert torch.equal(tensor, after[target]), name
    assert not any(".q_proj." in name for name in after)
    for shard in base.glob("*.safetensors"):  # the data behind the header is the same, byte for byte
        n, m = (int.from_bytes((d / shard.name).read_bytes()[:8], "little") + 8 for d in (base, native))
        assert shard.read_bytes()[n:] == (native / shard.name).read_bytes()[m:]


def test_label_says_how_far_it_is_right(native):
    text = (native / "README.md").read_text()
    assert "**Context <= index_topk = 16.**" in text and "|f(v) - 1| has median" in text and "index_head_dim is 16" in text
    manifest = json.loads((native / "upcycle_manifest.json").read_text())
    assert manifest["layout"] == "native" and manifest["native"]["base_indexers"] == {"kind": "neutral"}
    assert manifest["native"]["context"] == "<= index_topk = 16"
    v = tensors_of(native)["model.embed_tokens.weight"].double().square().mean(-1)
    f = 1 / torch.sqrt(v / (v + 1e-6) + 1e-6)
    recorded = manifest["native"]["eps_effect_of_layer_0"]
    assert recorded["largest"] == pytest.approx(float((f - 1).abs().max()), rel=1e-9)
    assert recorded["median"] == pytest.approx(float((f - 1).abs().median()), rel=1e-2)


def test_bf16_latent_is_within_rounding(tmp_path):
    """1/w is rounded to the base's dtype: the query is off by half a last place of bf16, not more."""
    base = make_tiny_tokenizer(make_tiny_base(tmp_path / "base", dtype=torch.bfloat16))
    export(write_run(tmp_path / "save", base), base, tmp_path / "out", layout="native", progress=False)
    state = tensors_of(tmp_path / "out")
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    norm = state["model.layers.1.input_layernorm.weight"].double()
    latent = state["model.layers.1.self_attn.q_a_proj.weight"].double()
    assert torch.equal(latent, torch.diag(latent.diagonal()))
    assert (norm * latent.diagonal() - 1).abs().max() <= 2**-8
    assert {p.dtype for p in load(tmp_path / "out", dtype="auto").parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("weight", [0.0, 1e-42])
def test_norm_weights_that_cannot_be_divided_by(tmp_path, weight):
    base = make_tiny_tokenizer(make_tiny_base(tmp_path / "base"))
    shard = next(f for f in base.glob("*.safetensors") if "model.layers.1.input_layernorm.weight" in load_file(f))
    state = load_file(shard)
    state["model.layers.1.input_layernorm.weight"][7] = weight
    save_file(state, shard, metadata={"format": "pt"})
    save = write_run(tmp_path / "save", base)
    with pytest.raises(UserError, match=r"layers\.1\.input_layernorm.*1 of 64 weights are zero or too small.*hybrid"):
        export(save, base, tmp_path / "out", layout="native", progress=False)
    assert not (tmp_path / "out").exists()


def test_check_passes(native, base, tmp_path, capsys):
    assert check(native, base, tmp_path / "check.json") == 0
    found = {item["name"]: item["detail"] for item in json.loads((tmp_path / "check.json").read_text())["checks"]}
    assert "3 latents made of the base's norms; indexers neutral" in found["native layers"]
    assert "|f(v) - 1| of the base's query latents at most" in found["loads"]
    assert "routes by sigmoid" in capsys.readouterr().out


def _latent(tensors: dict) -> None:
    tensors["model.layers.1.self_attn.q_a_proj.weight"][3, 3] *= 1.001


def _indexer(tensors: dict) -> None:
    tensors["model.layers.2.self_attn.indexer.wk.weight"][0, 0] = 0.5


def _query(tensors: dict) -> None:
    name = next(name for name in tensors if name.endswith("q_b_proj.weight"))
    tensors[name][0, 0] += 1


@pytest.mark.parametrize(
    ("shard", "change", "name", "message"),
    [
        (ADDITIONS, _latent, "native layers", "q_a_proj.weight is not made of the base's norm weights"),
        (ADDITIONS, _indexer, "native layers", "are not neutral, the manifest calls them 'neutral'"),
        ("model-00001-of-00002.safetensors", _query, "base tensors", "q_proj.weight"),
    ],
)
def test_check_notices(native, base, tmp_path, shard, change, name, message):
    copy = shutil.copytree(native, tmp_path / "copy")
    edit_tensors(copy / shard, change)
    forge_manifest(copy)
    assert check(copy, base, tmp_path / "check.json") == 2
    checks = json.loads((tmp_path / "check.json").read_text())["checks"]
    assert [c["name"] for c in checks if c["status"] == "FAIL"] == [name]
    assert message in next(c["detail"] for c in checks if c["name"] == name)


@pytest.mark.parametrize("change", [{"scoring_func": "sigmoid"}, {"rope_scaling": None}, {"index_topk": 15}, {"n_group": 8}])
def test_check_notices_the_config(native, base, tmp_path, change):
    copy = shutil.copytree(native, tmp_path / "copy")
    edit_json(copy / "config.json", lambda c: c.update(change))
    forge_manifest(copy)
    assert check(copy, base, load=False) == (0 if change == {"index_topk": 15} else 2)  # 15 is as good a claim


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scoring_func": "sigmoid"}, "routes greedily by softmax"),
        ({"topk_method": "noaux_tc"}, "routes greedily by softmax"),
        ({"q_lora_rank": None}, "has a query latent"),
        ({"dsa_base_layers": 9}, "dsa_base_layers must be 0 to"),
        ({"index_head_dim": 4}, "must hold qk_rope_head_dim"),
        ({"index_n_heads": 0}, "at least 1"),
    ],
)
def test_configuration_refuses(values, message):
    """A real V3.2 with this code would route wrongly, as V2 does with theirs."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "q_lora_rank": 64, "qk_rope_head_dim": 8}
    with pytest.raises(ValueError, match=message):
        DeepseekV32SoftmaxConfig(**(sizes | values))
