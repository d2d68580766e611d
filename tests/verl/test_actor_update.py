"""verl 0.9.1's own actor worker trains a native export on a CPU, with the launch script's settings."""

import json
import subprocess

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.checkpoint.oracle import tensors_of
from tests.hf_model.other_environment import verl_python
from tests.verl.conftest import clean_environment, run_inside
from tests.verl.launches import overrides

FP32 = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("update")


@pytest.fixture(scope="module")
def runs(native, work):
    """FSDP2, FSDP1, and FSDP1 as verl has it by default."""
    given = overrides("grpo_v2_lite_cuda", OFFLOAD="0")
    small = [
        f"actor_rollout_ref.model.path={native}",
        f"{ACTOR}.optim.lr=1e-2",
        f"{ACTOR}.optim.weight_decay=0.1",
        f"{ACTOR}.optim.lr_warmup_steps=0",
    ]
    small.append(f"+{ACTOR}.fsdp_config.mixed_precision={FP32}")  # log-probs are compared
    strategies = [["fsdp2"], ["fsdp"], ["fsdp", f"{ACTOR}.fsdp_config.use_orig_params=False"]]
    more = [[f"{ACTOR}.strategy={strategy}", *rest] for strategy, *rest in strategies]
    reports = run_inside("actor_update.py", work, overrides=[*given, *small], runs=more, model=native)
    return dict(zip(("fsdp2", "fsdp", "default"), reports, strict=True))


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_an_update_moves_all_but_the_indexers(runs, strategy):
    """Every indexer is bit-equal after Adam with weight decay, and nothing else stands still."""
    report = runs[strategy]
    assert report["grad_norm"] > 0, report
    still = set(report["names"]) - set(report["moved"])
    assert still == {name for name in report["names"] if ".indexer." in name} and len(still) == 25
    assert report["class"] == "megatron_patch.verl.external.DeepseekV32ForCausalLM"


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_packed_log_probs_are_those_of_each_row_alone(runs, strategy):
    """verl packs rows without their padding: no key of another row may be chosen. Rows are longer than index_topk."""
    assert runs[strategy]["log_prob_difference"] < 1e-4


def test_the_engine_gets_exactly_the_directorys_tensors(runs, native):
    index = json.loads((native / "model.safetensors.index.json").read_text())["weight_map"]
    for strategy in ("fsdp2", "fsdp"):
        assert sorted(runs[strategy]["names"]) == sorted(index)


def test_verls_default_for_fsdp1_refuses_frozen_indexers(runs):
    """Why the scripts set use_orig_params: should this pass one day, they need not."""
    assert "uniform `requires_grad`" in runs["default"]["error"]


def test_a_checkpoint_becomes_a_directory_like_the_first(runs, work, native):
    """verl's merger, then the files that it leaves out: the weights are the trained ones, the rest is the export's."""
    given = [f"--checkpoint={work / 'checkpoint'}", f"--model={native}", f"--output={work / 'merged'}"]
    command = [verl_python(), "-W", "ignore", "-m", "megatron_patch.verl.merge", *given]
    done = subprocess.run(command, env=clean_environment(work), cwd=work, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    trained, merged = load_file(work / "after.safetensors"), tensors_of(work / "merged")
    assert merged.keys() == trained.keys() == set(runs["fsdp2"]["names"])
    assert all(torch.equal(merged[name], trained[name].bfloat16()) for name in merged)
    before, after = (json.loads((path / "config.json").read_text()) for path in (native, work / "merged"))
    assert after == before | {"torch_dtype": "bfloat16"} and after["rope_scaling"]["type"] == "yarn"
    model, info = AutoModelForCausalLM.from_pretrained(
        work / "merged", trust_remote_code=True, output_loading_info=True
    )
    assert type(model).__name__ == "DeepseekV32ForCausalLM" and not info["missing_keys"] and not info["unexpected_keys"]
    again = subprocess.run(command, env=clean_environment(work), cwd=work, capture_output=True, text=True)
    assert again.returncode == 2 and again.stderr.startswith("error: --output must be a new or empty directory")
