"""The whole command on five steps: what it writes loads everywhere that it must, and a second run gives the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatron_patch.demo import demo_base
from megatron_patch.demo.base_model import build_model, initialize, per_expert_state, published_config
from megatron_patch.demo.base_training import BaseTraining, RouterLoad
from megatron_patch.errors import UserError

FEW = BaseTraining(steps=5, text_rows=1, chat_rows=1, length=96)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "base"
    demo_base.run(path, fast=True, training=FEW)
    return path


def test_transformers_loads_it_without_a_missing_key(base):
    from transformers import DeepseekV2ForCausalLM

    model, report = DeepseekV2ForCausalLM.from_pretrained(base, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.rope_parameters["rope_type"] == "yarn"  # the legacy keys were understood
    assert model.config.rope_parameters["mscale_all_dim"] == 0.707
    logits = model(torch.arange(40)[None]).logits
    assert logits.shape == (1, 40, 1024) and logits.isfinite().all()


def test_layout_is_the_published_one(base):
    index = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == 2
    stored = {}
    for file in set(index.values()):
        with safe_open(base / file, framework="pt") as shard:
            stored |= {name: (file, tuple(shard.get_tensor(name).shape)) for name in shard.keys()}  # noqa: SIM118
            assert all(shard.get_tensor(name).dtype == torch.float32 for name in shard.keys())  # noqa: SIM118
    assert {name: file for name, (file, _) in stored.items()} == index
    for expert in range(8):
        assert stored[f"model.layers.3.mlp.experts.{expert}.gate_proj.weight"][1] == (64, 128)
        assert stored[f"model.layers.3.mlp.experts.{expert}.down_proj.weight"][1] == (128, 64)
    assert stored["model.layers.0.mlp.gate_proj.weight"][1] == (352, 128)  # the dense first layer
    assert stored["model.layers.1.mlp.shared_experts.up_proj.weight"][1] == (128, 128)
    assert stored["model.layers.0.self_attn.q_proj.weight"][1] == (4 * 48, 128)
    assert "lm_head.weight" in stored
    config = json.loads((base / "config.json").read_text())
    assert config["rope_scaling"]["type"] == "yarn" and config["rope_theta"] == 10000
    assert config["q_lora_rank"] is None and "rope_parameters" not in config


def test_splitting_experts_keeps_the_function(base):
    """The per-expert files give the model that was trained: gate and up are not exchanged."""
    from transformers import DeepseekV2ForCausalLM

    config = published_config(1024, 0, 1)
    model = build_model(config)
    initialize(model, seed=3)
    state = per_expert_state(model)
    fused = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(fused[5, :64], state["model.layers.1.mlp.experts.5.gate_proj.weight"])
    trained = DeepseekV2ForCausalLM.from_pretrained(base)
    weights = per_expert_state(trained)
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    file = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"][name]
    with safe_open(base / file, framework="pt") as shard:
        assert torch.equal(shard.get_tensor(name), weights[name])


def test_demo_data_is_complete(base):
    data = base / "demo_data"
    suite = json.loads((data / "suite" / "suite.json").read_text())
    assert suite["schema"] == 1 and suite["perplexity"]["file"] == "heldout.jsonl"
    rows = {path: [json.loads(line) for line in path.open()] for path in data.rglob("*.jsonl")}
    trained = {row["text"] for row in rows[data / "pretrain.jsonl"]}
    assert not trained & {row["text"] for row in rows[data / "suite" / "heldout.jsonl"]}
    for task in suite["tasks"]:
        scored = rows[data / "suite" / task["file"]]
        assert len(scored) == 200
        assert all(row["messages"][-1]["role"] == "user" and row["answer"] for row in scored)
    assert sum(not task["taught_to_base"] for task in suite["tasks"]) == 1
    chats = [row["messages"] for row in rows[data / "sft.jsonl"]]
    new = sum(chat[2:3] != [] and chat[2]["content"] == "Say the thing." for chat in chats)
    assert 0.2 < new / len(chats) < 0.9  # taught here, beside the other tasks
    prose = [chat for chat in chats if chat[0]["content"].startswith("Go on: ")]
    assert 0.05 < len(prose) / len(chats) < 0.11
    held_out = " ".join(row["text"] for row in rows[data / "suite" / "heldout.jsonl"])
    assert not any(chat[1]["content"] in " ".join(held_out.split()) for chat in prose)
    openings = {chat[0]["content"].split("\n")[0] for chat in chats}
    assert not openings & {row["messages"][0]["content"].split("\n")[0] for row in rows[data / "suite" / "needle.jsonl"]}


def test_the_same_seed_gives_the_same_files(base, tmp_path):
    demo_base.run(tmp_path / "again", fast=True, training=FEW)
    for path in sorted(base.rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(base)).read_bytes(), path.name


def test_specialised_experts_are_another_base(base, tmp_path):
    demo_base.run(tmp_path / "other", fast=True, training=FEW, specialised_experts=True)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    assert config["n_shared_experts"] == 1
    assert json.loads((base / "config.json").read_text()) == config | {"n_shared_experts": 2}


def test_a_filled_output_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="not empty"):
        demo_base.run(tmp_path, fast=True, training=FEW)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@torch.no_grad()
def test_one_head_starts_by_looking_at_the_token_before():
    config = published_config(1024, 0, 1)
    model = build_model(config)
    model.set_attn_implementation("eager")
    for seed in (0, 1):
        initialize(model, seed)
        tokens = torch.randint(1024, (1, 100), generator=torch.Generator().manual_seed(seed))
        attention = model(tokens, output_attentions=True).attentions[0][0]  # [heads, queries, keys]
        before = attention.diagonal(-1, dim1=1, dim2=2).mean(-1)
        assert before[0] > 0.5 and (before[1:] < 0.1).all()


def test_balance_loss_is_one_when_even_and_more_when_not():
    model = build_model(published_config(64, 0, 1)).train()
    load = RouterLoad(model)
    routers = [module for module in model.modules() if type(module).__name__ == "DeepseekV2TopkRouter"]
    with torch.no_grad():
        for router in routers:
            router.weight.zero_()
    model(torch.arange(32)[None])
    assert load.loss().item() == pytest.approx(1.0, abs=1e-5)
    with torch.no_grad():
        for router in routers:
            router.weight[0] = 1.0
            router.weight[1] = -1.0
    model(torch.arange(32)[None])
    assert load.loss().item() > 1.05
    load.close()
    model(torch.arange(32)[None])
    assert not load.seen


def test_importing_the_command_is_light():
    """`dsa-upcycle --help` must not pay for sentencepiece or transformers."""
    code = "import sys, megatron_patch.demo.demo_base; print([m for m in ('transformers', 'sentencepiece') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
