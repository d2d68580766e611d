"""Families are data: which tensor plays which part, and what is not supported is refused by name."""

import json

import pytest

from megatron_patch.errors import UserError
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.families import families, family_of
from megatron_patch.pruning.families.family import Role
from tests.pruning import checkpoints


@pytest.mark.parametrize("model_type", ["deepseek_v41", "qwen3_moe", None])
def test_unknown_types_are_refused_with_the_known_ones(model_type):
    with pytest.raises(
        UserError,
        match=f"{model_type!r} is not supported; known are deepseek_v2, deepseek_v3, deepseek_v32, deepseek_v4",
    ):
        family_of({"model_type": model_type})


@pytest.mark.parametrize(
    "model_type, name, role, layer, expert",
    [
        ("deepseek_v3", "model.layers.60.mlp.experts.255.up_proj.weight_scale_inv", Role.EXPERT, 60, 255),
        ("deepseek_v3", "model.layers.61.mlp.gate.e_score_correction_bias", Role.BIAS, 61, None),
        ("deepseek_v3", "model.layers.61.mlp.gate.weight", Role.ROUTER, 61, None),
        ("deepseek_v32", "model.layers.61.self_attn.indexer.wk.weight", Role.OTHER, 61, None),
        ("deepseek_v32", "model.layers.3.mlp.shared_experts.up_proj.weight", Role.OTHER, 3, None),
        ("deepseek_v2", "model.layers.0.mlp.gate_proj.weight", Role.OTHER, 0, None),
        ("deepseek_v4", "layers.0.ffn.gate.tid2eid", Role.TABLE, 0, None),
        ("deepseek_v4", "layers.42.ffn.experts.7.w2.scale", Role.EXPERT, 42, 7),
        ("deepseek_v4", "mtp.0.ffn.experts.7.w2.weight", Role.EXPERT, 61, 7),
        ("deepseek_v4", "hc_head_fn", Role.OTHER, None, None),
    ],
)  # fmt: skip
def test_parts_of_a_name(model_type, name, role, layer, expert):
    key = families()[model_type].namings[0].parse(name, num_layers=61)
    assert (key.role, key.layer, key.expert) == (role, layer, expert)
    if expert is not None:
        assert key.renamed(expert) == name
        assert key.renamed(3) == name.replace(f"experts.{expert}.", "experts.3.")


def test_published_sizes_of_the_routers():
    v32 = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "num_hidden_layers": 61}
    v32 |= {"first_k_dense_replace": 3, "model_type": "deepseek_v32", "norm_topk_prob": True}
    family = family_of(v32)
    assert family.routing(v32) == type(family.routing(v32))(256, 8, 8, 4, 2)
    assert family.moe_layers(v32) == tuple(range(3, 61)) and family.keeps_mass(v32)
    lite = {"model_type": "deepseek_v2", "n_routed_experts": 64, "num_experts_per_tok": 6, "topk_method": "greedy"}
    lite |= {
        "n_group": 1,
        "topk_group": 1,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
    }
    assert family_of(lite).routing(lite).n_group == 1 and not family_of(lite).keeps_mass(lite)


@pytest.mark.parametrize("ratios", [[0, 4, 128, 4, 0], [0, 4, 128, 4, 0, 0, 0]])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_v4_in_both_namespaces_with_more_compress_ratios_than_layers(tmp_path, prefix, ratios):
    model = checkpoints.make(tmp_path / "m", "deepseek_v4", prefix=prefix, compress_ratios=ratios)
    checkpoint = MoeCheckpoint(model)
    assert sorted(checkpoint.layers) == [0, 1, 2, 3, 4] and checkpoint.mtp_layers == (4,)
    assert [bool(layer.table) for layer in checkpoint.layers.values()] == [True, True, False, False, False]
    assert all(len(layer.experts) == checkpoints.EXPERTS for layer in checkpoint.layers.values())


def test_names_of_two_conversions_are_refused(tmp_path):
    config = checkpoints.CONFIGS["deepseek_v4"]
    state = checkpoints.state_of(config)
    mixed = {("model." if name.startswith("layers.3.") else "") + name: tensor for name, tensor in state.items()}
    with pytest.raises(UserError, match=r"tensors must be named in one way: found layers.N.ffn and model.layers.N.ffn"):
        MoeCheckpoint(checkpoints.write(tmp_path / "m", config, mixed))


def test_v4_under_transformers_names(tmp_path):
    config = checkpoints.CONFIGS["deepseek_v4"]
    native = checkpoints.state_of(config)
    renamed = {}
    for name, tensor in native.items():
        for old, new in ((".ffn.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")):
            name = name.replace(old, new)
        renamed["model." + name.replace("gate.bias", "gate.e_score_correction_bias")] = tensor
    checkpoint = MoeCheckpoint(checkpoints.write(tmp_path / "m", config, renamed))
    assert checkpoint.naming.name == "model.layers.N.mlp" and sorted(checkpoint.layers) == [0, 1, 2, 3]


def test_fused_experts_are_refused(tmp_path):
    import torch

    config = checkpoints.CONFIGS["deepseek_v3"]
    state = {"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(2)}
    with pytest.raises(
        UserError, match=r"each expert must have its own tensors: model.layers.1.mlp.experts.gate_up_proj"
    ):
        MoeCheckpoint(checkpoints.write(tmp_path / "m", config, state))


def test_config_that_names_single_experts_is_refused(tmp_path):
    model = checkpoints.make(tmp_path / "m", "deepseek_v3")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"ignore": ["model.layers.1.mlp.experts.3.up_proj"]}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"config.json may not name single experts, whose numbers change: it has experts.3"
    ):
        MoeCheckpoint(model)
