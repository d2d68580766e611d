"""The GRPO scripts: every word that they give is one that verl 0.9.1's own configuration takes, and says what is meant."""

import shlex
from pathlib import Path

import pytest

from tests.hf_model.other_environment import verl_python
from tests.verl.conftest import run_inside
from tests.verl.launches import ROOT, SCRIPTS, dry, overrides, value

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"
BAD = {
    "unknown key": ["actor_rollout_ref.actor.no_such_key=1"],
    "unknown loss": [f"{ACTOR}.loss_agg_mode=median"],
    "batch that does not fit": ["data.train_batch_size=7", f"{ACTOR}.use_dynamic_bsz=False"],
    "unknown mode": [f"{MEGATRON}.router_replay.mode=R9"],
}
VARIANTS = {
    "fsdp1": ("grpo_v2_lite_cuda", {"TRAINER": "fsdp", "ROLLOUT": "sglang", "KL_LOSS_COEF": "0.01"}),
    "megatron R2": (
        "grpo_v2_lite_a3",
        {"TRAINER": "megatron", "ROUTER_REPLAY": "R2", "EP": "8", "BRIDGE_LIB": "my_bridge"},
    ),
    "sglang on A3": ("grpo_v2_lite_a3", {"ROLLOUT": "sglang", "LOGGER": "console,tensorboard"}),
}
KEYS = [
    "model_engine", f"{ACTOR}.strategy", f"{ROLLOUT}.name", f"{ROLLOUT}.enable_rollout_routing_replay", f"{ROLLOUT}.n",
    f"{ROLLOUT}.calculate_log_probs", f"{MEGATRON}.router_replay.mode", f"{ACTOR}.fsdp_config.use_orig_params",
    f"{ACTOR}.use_kl_loss", "trainer.device", "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.logger",
    "actor_rollout_ref.model.external_lib", "actor_rollout_ref.model.trust_remote_code",
    "actor_rollout_ref.model.override_config", "reward.custom_reward_function.path", f"{ROLLOUT}.max_model_len",
    "ray_kwargs.ray_init.runtime_env.env_vars", "actor_rollout_ref.ref.fsdp_config.use_orig_params",
]  # fmt: skip


@pytest.fixture(scope="module")
def composed(tmp_path_factory) -> dict[str, dict]:
    """Every script as it stands, variants, and mistakes."""
    given = {name: overrides(name) for name in SCRIPTS}
    given |= {name: overrides(script, **variables) for name, (script, variables) in VARIANTS.items()}
    for name, mistake in BAD.items():
        given[name] = overrides("grpo_pruned_v32_a3" if "mode" in name else "grpo_v2_lite_cuda", *mistake)
    reports = run_inside("compose_all.py", tmp_path_factory.mktemp("compose"), launches=list(given.values()), keys=KEYS)
    return dict(zip(given, reports, strict=True))


def test_there_is_a_script_for_each_of_the_four_jobs():
    assert set(SCRIPTS) == {"grpo_v2_lite_cuda", "grpo_v2_lite_a3", "grpo_pruned_v32_a3", "grpo_pruned_v4_flash_a3"}


@pytest.mark.parametrize("name", [*SCRIPTS, *VARIANTS])
def test_verl_takes_every_word(composed, name):
    got = composed[name]
    assert "error" not in got, got
    assert got[f"{ROLLOUT}.calculate_log_probs"] is True  # without them no trainer/rollout mismatch is reported
    assert got["reward.custom_reward_function.path"] == "pkg://megatron_patch.verl.rewards"
    assert got["ray_kwargs.ray_init.runtime_env.env_vars"] == {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line(composed, name):
    error = composed[name].get("error", "")
    assert error.startswith(("verl's configuration must", "verl must accept")) and "\n" not in error


def test_the_jobs_have_their_sizes(composed):
    sizes = {name: (composed[name]["trainer.device"], composed[name]["trainer.nnodes"], composed[name]["trainer.n_gpus_per_node"]) for name in SCRIPTS}  # fmt: skip
    assert sizes == {
        "grpo_v2_lite_cuda": ("cuda", 1, 8),
        "grpo_v2_lite_a3": ("npu", 2, 16),
        "grpo_pruned_v32_a3": ("npu", 4, 16),
        "grpo_pruned_v4_flash_a3": ("npu", 2, 16),
    }


def test_fsdp_trains_our_class_beside_frozen_indexers(composed):
    for name in ("grpo_v2_lite_cuda", "grpo_v2_lite_a3", "fsdp1"):
        got = composed[name]
        assert (
            got["model_engine"] == "dp"
            and got["actor_rollout_ref.model.external_lib"] == "megatron_patch.verl.external"
        )
        assert got["actor_rollout_ref.model.trust_remote_code"] is False
        assert got["actor_rollout_ref.model.override_config"] == {"attn_implementation": "sdpa"}
        assert got[f"{ACTOR}.fsdp_config.use_orig_params"] and got["actor_rollout_ref.ref.fsdp_config.use_orig_params"]
    assert composed["fsdp1"][f"{ACTOR}.strategy"] == "fsdp" and composed["fsdp1"][f"{ROLLOUT}.name"] == "sglang"
    assert composed["fsdp1"][f"{ACTOR}.use_kl_loss"] and not composed["grpo_v2_lite_a3"][f"{ACTOR}.use_kl_loss"]


def test_the_router_replay_switch_reaches_both_sides(composed):
    """R3 needs the engine to hand its routes over; R2 is the trainer's own business."""
    v32, r2 = composed["grpo_pruned_v32_a3"], composed["megatron R2"]
    assert v32[f"{MEGATRON}.router_replay.mode"] == "R3" and v32[f"{ROLLOUT}.enable_rollout_routing_replay"] is True
    assert r2[f"{MEGATRON}.router_replay.mode"] == "R2" and r2[f"{ROLLOUT}.enable_rollout_routing_replay"] is False
    assert r2["actor_rollout_ref.model.external_lib"] == "my_bridge"
    assert composed["grpo_pruned_v4_flash_a3"][f"{MEGATRON}.router_replay.mode"] == "disabled"


@pytest.mark.parametrize(
    "script, variables, message",
    [
        ("grpo_v2_lite_cuda", {"MODEL": ""}, "MODEL is not set"),
        ("grpo_v2_lite_cuda", {"DATA": ""}, "DATA is not set"),
        ("grpo_v2_lite_cuda", {"TRAINER": "deepspeed"}, "TRAINER must be fsdp, fsdp2 or megatron: deepspeed"),
        ("grpo_v2_lite_cuda", {"ROLLOUT": "vllm-ascend"}, "ROLLOUT=vllm-ascend needs DEVICE=npu"),
        ("grpo_v2_lite_a3", {"ROLLOUT": "vllm"}, "ROLLOUT on NPUs is vllm-ascend or sglang: vllm"),
        ("grpo_v2_lite_a3", {"ROLLOUT": "tgi"}, "ROLLOUT must be vllm, vllm-ascend or sglang: tgi"),
    ],
)
def test_a_wrong_setting_is_named(script, variables, message):
    done = dry(script, **variables)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {message}"), done.stderr


def test_words_after_the_script_win():
    given = overrides("grpo_v2_lite_cuda", "data.train_batch_size=16", LR="3e-6", GROUP_SIZE="4")
    assert value(given, "data.train_batch_size") == "16"
    assert value(given, f"{ACTOR}.optim.lr") == "3e-6" and value(given, f"{ROLLOUT}.n") == "4"


def test_a_dry_run_prints_verls_configuration():
    done = dry("grpo_v2_lite_cuda", python=str(verl_python()))
    assert done.returncode == 0, done.stderr
    command, yaml = done.stdout.split("\n", 1)
    assert "verl.trainer.main_ppo" in shlex.split(command)
    assert "external_lib: megatron_patch.verl.external\n" in yaml and f"train_files: {ROOT}/d/train.parquet\n" in yaml


def test_a_dry_run_without_verl_says_so():
    done = dry("grpo_v2_lite_cuda")
    assert done.returncode == 0 and "verl is not importable by PYTHON=/nowhere/python" in done.stderr


@pytest.mark.parametrize(
    "name", sorted(path.name for path in (ROOT / "examples" / "verl").glob("*.sh") if path.name != "common.sh")
)
def test_what_has_not_run_is_said(name):
    assert "NOT RUN" in Path(ROOT / "examples" / "verl" / name).read_text().split("set -euo")[0]
