"""The mapping: without these, the two directions drift apart, or a tensor goes to the wrong expert or half."""

import pytest
import torch

from megatron_patch.checkpoint.hf_mapping import dsa_names, hybrid_mapping, require_same_names, sizes
from megatron_patch.errors import UserError
from megatron_patch.model.architecture import DsaSettings, architecture_from_config
from tests import tiny

# Written by hand, so that the table is not tested against itself: layer 0 dense and mla, layer 3 MoE and dsa.
DENSE_MLA_LAYER = {
    "decoder.layers.0.input_layernorm.weight": ["model.layers.0.input_layernorm.weight"],
    "decoder.layers.0.pre_mlp_layernorm.weight": ["model.layers.0.post_attention_layernorm.weight"],
    "decoder.layers.0.self_attention.linear_q_proj.weight": ["model.layers.0.self_attn.q_proj.weight"],
    "decoder.layers.0.self_attention.linear_kv_down_proj.weight": [
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    ],
    "decoder.layers.0.self_attention.kv_layernorm.weight": ["model.layers.0.self_attn.kv_a_layernorm.weight"],
    "decoder.layers.0.self_attention.linear_kv_up_proj.weight": ["model.layers.0.self_attn.kv_b_proj.weight"],
    "decoder.layers.0.self_attention.linear_proj.weight": ["model.layers.0.self_attn.o_proj.weight"],
    "decoder.layers.0.mlp.linear_fc1.weight": [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ],
    "decoder.layers.0.mlp.linear_fc2.weight": ["model.layers.0.mlp.down_proj.weight"],
}
DSA_ATTENTION = {
    "linear_q_down_proj.weight": "q_a_proj.weight",
    "q_layernorm.weight": "q_a_layernorm.weight",
    "linear_q_up_proj.weight": "q_b_proj.weight",
    "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
    "kv_layernorm.weight": "kv_a_layernorm.weight",
    "linear_kv_up_proj.weight": "kv_b_proj.weight",
    "linear_proj.weight": "o_proj.weight",
    "indexer.wq_b.weight": "indexer.wq_b.weight",
    "indexer.wk.weight": "indexer.wk.weight",
    "indexer.k_norm.weight": "indexer.k_norm.weight",
    "indexer.k_norm.bias": "indexer.k_norm.bias",
    "indexer.weights_proj.weight": "indexer.weights_proj.weight",
}
CONFIG = {**tiny.CONFIG, "n_routed_experts": 12}  # more than ten: "1" must not match "10"
ARCH = architecture_from_config(CONFIG)
PATTERN = ("mla",) * 3 + ("dsa",) * 2
DSA = DsaSettings(index_topk=16, index_n_heads=3, index_head_dim=20)


@pytest.fixture(scope="module")
def mapping():
    return hybrid_mapping(ARCH, PATTERN)


def test_covers_every_key_of_a_base_with_its_shape():
    base = hybrid_mapping(ARCH, PATTERN[:3])
    state = tiny.tiny_state(CONFIG)
    assert set(base.hf_names) == set(state)
    assert base.shapes(sizes(ARCH, DSA)) == {name: tuple(tensor.shape) for name, tensor in state.items()}


def test_names_of_a_dense_mla_layer(mapping):
    layer = {name: list(hf) for name, hf in mapping.entries.items() if name.startswith("decoder.layers.0.")}
    assert layer == DENSE_MLA_LAYER


def test_names_of_a_dsa_layer(mapping):
    prefix = "decoder.layers.3.self_attention."
    layer = {name: hf for name, hf in mapping.entries.items() if name.startswith(prefix)}
    assert layer == {prefix + m: ("model.layers.3.self_attn." + h,) for m, h in DSA_ATTENTION.items()}
    for moe_layer in (1, 4):
        m, h = f"decoder.layers.{moe_layer}.mlp.", f"model.layers.{moe_layer}.mlp."
        assert mapping.entries[m + "router.weight"] == (h + "gate.weight",)
        assert mapping.entries[m + "shared_experts.linear_fc2.weight"] == (h + "shared_experts.down_proj.weight",)
    assert mapping.entries["output_layer.weight"] == ("lm_head.weight",)
    assert mapping.entries["embedding.word_embeddings.weight"] == ("model.embed_tokens.weight",)
    assert mapping.entries["decoder.final_layernorm.weight"] == ("model.norm.weight",)


def test_expert_numbers_keep_their_place(mapping):
    for expert in (1, 10, 11):
        local = f"decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc1.weight"
        hf = f"model.layers.1.mlp.experts.{expert}."
        assert mapping.entries[local] == (hf + "gate_proj.weight", hf + "up_proj.weight")
    experts = {n for n in mapping.entries if n.startswith("decoder.layers.1.mlp.experts.local_experts.")}
    assert len(experts) == 2 * 12


def test_is_a_bijection(mapping):
    hf = [name for sources in mapping.entries.values() for name in sources]
    assert len(hf) == len(set(hf)) == len(mapping.hf_names)
    assert all(mapping.megatron_name[name] in mapping.entries for name in hf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_exact(mapping, dtype):
    torch.manual_seed(0)
    state = {name: torch.randn(shape).to(dtype) for name, shape in mapping.shapes(sizes(ARCH, DSA)).items()}
    megatron = {name: mapping.to_megatron(name, state) for name in mapping.entries}
    back = {hf: t for name, tensor in megatron.items() for hf, t in mapping.to_hf(name, tensor).items()}
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_gate_is_above_up(mapping):
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    gate, up = mapping.entries[name]
    joined = mapping.to_megatron(name, {gate: torch.zeros(96, 64), up: torch.ones(96, 64)})
    assert joined.shape == (192, 64) and joined[:96].sum() == 0 and joined[96:].min() == 1
    assert mapping.to_hf(name, joined)[up].min() == 1


def test_to_hf_gives_views(mapping):
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    joined = torch.zeros(192, 64)
    for part in mapping.to_hf(name, joined).values():
        part.fill_(1)
    assert joined.min() == 1  # the loader fills parameters through these views
    with pytest.raises(ValueError, match="193 rows do not divide by its 2 parts"):
        mapping.to_hf(name, torch.zeros(193, 64))


def test_what_trains_is_the_new_layers(mapping):
    names = dsa_names(mapping, ARCH)
    assert {name.split(".")[2] for name in names} == {"3", "4"}
    base = hybrid_mapping(ARCH, PATTERN[:3])
    assert set(names) | set(base.entries) == set(mapping.entries) and not set(names) & set(base.entries)


def test_layer_ten_is_not_layer_one():
    arch = architecture_from_config({**tiny.CONFIG, "num_hidden_layers": 10})
    names = dsa_names(hybrid_mapping(arch, ("mla",) * 10 + ("dsa",)), arch)
    assert {name.split(".")[2] for name in names} == {"10"}


def test_unknown_names_are_errors(mapping):
    with pytest.raises(KeyError):
        mapping.to_megatron("decoder.layers.9.input_layernorm.weight", {})
    with pytest.raises(KeyError):
        mapping.to_megatron("output_layer.weight", {})
    with pytest.raises(
        UserError, match=r"m must hold exactly the model's 4 tensors: 4 missing \(a, b, c, \.\.\.\); get it"
    ):
        require_same_names("m", "abcd", "", "get it")
    with pytest.raises(UserError, match=r"1 unknown \(e\)"):
        require_same_names("m", "abcd", "abcde", "get it")
    with pytest.raises(UserError, match="the layer pattern must be"):
        hybrid_mapping(ARCH, ("mla", "dsa", "mla", "mla"))
