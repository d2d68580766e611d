"""Bad checkpoints, plans and statistics end with one line before anything is written."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patch.errors import UserError
from megatron_patch.pruning import plan
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.plan_file import read_plan
from megatron_patch.pruning.statistics import Statistics
from megatron_patch.pruning.wish import Wish
from tests.pruning import checkpoints

V3 = checkpoints.CONFIGS["deepseek_v3"]
EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"


def built(tmp_path, change, config=V3, **options):
    state = checkpoints.state_of(config)
    change(state)
    return checkpoints.write(tmp_path / "m", config, state, **options)


def drop_expert(state):
    for name in [name for name in state if ".layers.2.mlp.experts.5." in name]:
        del state[name]


def drop_matrix(state):
    del state[EXPERT.format(5)]


def drop_scale(state):
    state |= checkpoints.quantised(state, "fp8")
    del state[EXPERT.format(5) + "_scale_inv"]


def other_scale(state):
    for name in [name for name in state if ".experts." in name and "shared" not in name]:
        state[name.removesuffix("weight") + "zero_point"] = torch.zeros(1)


def other_shape(state):
    state[EXPERT.format(5)] = torch.zeros(3, 3)


def long_bias(state):
    state["model.layers.1.mlp.gate.e_score_correction_bias"] = torch.zeros(20)


def long_router(state):
    state["model.layers.1.mlp.gate.weight"] = torch.zeros(20, 32)


def unknown_tensor(state):
    state["model.layers.1.mlp.gate.weight_scale_inv"] = torch.zeros(1)


def no_router(state):
    del state["model.layers.1.mlp.gate.weight"]


def no_bias(state):
    del state["model.layers.1.mlp.gate.e_score_correction_bias"]


def not_renumbered(state):
    """As a pruning of 32 to 16 leaves it that keeps the old numbers."""
    for name in [name for name in state if ".layers.1.mlp.experts.3." in name]:
        state[name.replace("experts.3.", "experts.30.")] = state.pop(name)


def experts_in_a_dense_layer(state):
    for name in [name for name in state if ".layers.1.mlp." in name]:
        state[name.replace(".layers.1.", ".layers.0.")] = state[name].clone()


@pytest.mark.parametrize(
    "change, words",
    [
        (drop_expert, "every expert must be there: layer 2 .* lacks 1 of 16, the first is 5"),
        (drop_matrix, "expert 5 in layer 1 .* lacks up_proj.weight"),
        (drop_scale, "expert 5 in layer 1 .* lacks up_proj.weight_scale_inv"),
        (other_scale, "this quantisation is not supported"),
        (other_shape, "experts of a layer must have one shape and dtype: up_proj.weight in layer 1"),
        (
            long_bias,
            r"e_score_correction_bias has shape \[20\] for 16 experts; an earlier pruning left it at its old length",
        ),
        (long_router, r"gate.weight has shape \[20, 32\] for 16 experts"),
        (unknown_tensor, "every tensor of a MoE block must be known: model.layers.1.mlp.gate.weight_scale_inv"),
        (no_router, "layer 1 lacks a router"),
        (no_bias, "a router must have its gate.e_score_correction_bias: layer 1"),
        (not_renumbered, "numbered 0 to 15 .* has expert 30 of 16; an earlier pruning did not renumber"),
        (experts_in_a_dense_layer, "layer 0 has them and should not"),
    ],
)
def test_bad_checkpoints(tmp_path, change, words):
    model = built(tmp_path, change)
    with pytest.raises(UserError, match=words) as error:
        MoeCheckpoint(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value, words", [(16, "0 to 15: .* has 0 to 16"), (-1, "has -1 to")])
def test_a_table_out_of_range(tmp_path, value, words):
    def change(state):
        state["layers.0.ffn.gate.tid2eid"][0, 0] = 0
        state["layers.0.ffn.gate.tid2eid"][5, 1] = value

    with pytest.raises(UserError, match=words):
        MoeCheckpoint(built(tmp_path, change, checkpoints.CONFIGS["deepseek_v4"]))


def test_a_hash_layer_without_its_table(tmp_path):
    def change(state):
        del state["layers.1.ffn.gate.tid2eid"]

    with pytest.raises(UserError, match=r"num_hash_layers = 2 says: layer 1 .* lacks its table"):
        MoeCheckpoint(built(tmp_path, change, checkpoints.CONFIGS["deepseek_v4"]))


def test_a_table_of_another_width(tmp_path):
    def change(state):
        state["layers.0.ffn.gate.tid2eid"] = torch.zeros(96, 2, dtype=torch.int64)

    with pytest.raises(UserError, match=r"must be \[vocabulary, top_k = 3\]"):
        MoeCheckpoint(built(tmp_path, change, checkpoints.CONFIGS["deepseek_v4"]))


def test_a_key_in_two_shards(tmp_path):
    model = checkpoints.make(tmp_path / "m", "deepseek_v3")
    first, second = sorted(model.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second, metadata={"format": "pt"})
    with pytest.raises(UserError, match="every tensor of a shard must be in the index, once"):
        MoeCheckpoint(model)


def test_a_truncated_shard(tmp_path):
    model = checkpoints.make(tmp_path / "m", "deepseek_v3")
    shard = sorted(model.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(UserError, match="truncated or damaged"):
        MoeCheckpoint(model)


def test_statistics_of_another_model(tmp_path):
    one = checkpoints.make(tmp_path / "one", "deepseek_v3")
    stats = checkpoints.make_statistics(one, tmp_path / "s")
    other = checkpoints.make(tmp_path / "other", "deepseek_v3", shards=2)
    with pytest.raises(UserError, match=r"--stats must be of this model: .* has index sha256 "):
        plan.make_plan(other, Wish(keep=8), stats)
    lite = checkpoints.make(tmp_path / "lite", "deepseek_v2")
    with pytest.raises(UserError, match=r"has model_type deepseek_v3, .* deepseek_v2; observe this model"):
        plan.make_plan(lite, Wish(keep=8), stats)


def test_statistics_without_a_layer(tmp_path):
    model = checkpoints.make(tmp_path / "m", "deepseek_v3")
    stats = checkpoints.make_statistics(model, tmp_path / "s", layers=(1,))
    with pytest.raises(UserError, match="lacks layer 2; observe again"):
        plan.make_plan(model, Wish(keep=8), stats)
    stats = checkpoints.make_statistics(model, tmp_path / "s")
    with pytest.raises(UserError, match="lacks layer 3; use --mtp drop: transformers never runs an MTP layer"):
        plan.make_plan(model, Wish(keep=8, mtp="scores"), stats)


def test_counts_alone_serve_no_gate_criterion(tmp_path):
    model = checkpoints.make(tmp_path / "m", "deepseek_v3")
    whole = Statistics.load(checkpoints.make_statistics(model, tmp_path / "s"))
    counted = {name: type(s).routed_only(s.tokens, s.count) for name, s in whole.sources.items()}
    type(whole)(**{**vars(whole), "sources": counted}).save(tmp_path / "counts")
    assert (
        plan.make_plan(model, Wish(keep=8), tmp_path / "counts")["layers"]
        == plan.make_plan(model, Wish(keep=8), tmp_path / "s")["layers"]
    )
    with pytest.raises(UserError, match="--criterion reap needs routing weights"):
        plan.make_plan(model, Wish(keep=8, criterion="reap"), tmp_path / "counts")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda p: p.update(schema=2), "schema 2"),
        (lambda p: p.pop("layers"), "layers"),
        (lambda p: p.update(source_index_sha256="0" * 64), "--plan must be for this model"),
        (lambda p: p["layers"].pop("2"), "it lists other layers, e.g. 2"),
        (lambda p: p["layers"]["1"]["old_to_new"].update({"0": 5}), "must renumber in order: layer 1"),
        (lambda p: p["layers"]["1"].update(kept=[0, 1], old_to_new={"0": 0, "1": 1}), "layer 1 must keep 8 experts"),
        (lambda p: p["config_changes"].update(n_routed_experts=[99, 8]), "the plan changes it from 99"),
        (lambda p: p["config_changes"].update(hidden_size=[32, 8]), "config.json has hidden_size = 32"),
        (lambda p: p["config_changes"].pop("n_routed_experts"), "keeps 8 experts and writes n_routed_experts = 16"),
    ],
)
def test_bad_plans(tmp_path, change, words):
    model = checkpoints.make(tmp_path / "m", "deepseek_v3")
    content = plan.make_plan(model, Wish(keep=8), checkpoints.make_statistics(model, tmp_path / "s"))
    change(content)
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=words):
        read_plan(tmp_path / "plan.json", MoeCheckpoint(model))
