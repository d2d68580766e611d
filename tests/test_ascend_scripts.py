"""The launch scripts for Atlas A2 and A3: their flags are the programs' own, and what they print is what would run."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patch import cli
from megatron_patch.config import TrainSettings
from megatron_patch.data.pretrain_corpus import PretrainCorpusSettings
from megatron_patch.data.sft_corpus import SftCorpusSettings
from megatron_patch.flags import flag_names, parse
from tests.test_scripts import ROOT, bash, settings_of

FOLDERS = {"ascend_a2": 8, "ascend_a3": 16}
CONFIG = str(ROOT / "tests" / "data" / "deepseek_v2_lite_config.json")
INPUTS = {"BASE_MODEL": CONFIG, "DATA_PATH": "d", "SUITE": "s", "TEXT": "t*.jsonl", "CHATS": "c.jsonl", "PYTHONPATH": str(ROOT)}
TWO_NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "HCCL_SOCKET_IFNAME": "eth0"}


def dry_run(folder: str, script: str, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """With this environment's programs: the plan really runs."""
    path = Path(sys.executable).parent
    return bash(ROOT / "examples" / folder / script, *argv, path=path, **({"DRY_RUN": "1"} | INPUTS | variables))


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("script, more", [("pretrain.sh", TWO_NODES), ("sft.sh", {})])
def test_training_is_the_job_of_the_documents(folder: str, script: str, more: dict) -> None:
    """TP1 PP1 EP8, 4096 tokens, bf16, on all devices of the nodes; logs by rank; and the plan of the same layout."""
    done = dry_run(folder, script, "--seed", "7", **more)
    assert done.returncode == 0, done.stderr
    [command] = [shlex.split(line) for line in done.stdout.splitlines()]
    line, devices = " ".join(command), FOLDERS[folder]
    settings = settings_of(command)
    sizes = settings.parallel
    assert (sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size, sizes.expert_model_parallel_size) == (1, 1, 8)
    assert sizes.use_distributed_optimizer and settings.precision.bf16 and settings.precision.device == "npu"
    assert settings.data.seq_length == 4096 and settings.steps.seed == 7
    assert settings.steps.global_batch_size % (devices * int(more.get("NNODES", 1))) == 0
    assert f"--nproc-per-node {devices}" in line and "--log-dir runs/v2_lite/logs --redirects 3 --tee 0:3" in line
    assert settings.output.wandb_project and settings.output.wandb_mode == "offline"
    where = "--nnodes 2 --node-rank 1 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500" if more else "--standalone"
    assert where in line
    dp = devices * int(more.get("NNODES", 1))
    assert f"ep8 etp1 cp1 dp{dp}" in done.stderr and "fits a device of 64 GB" in done.stderr


def test_variables_reach_their_flags() -> None:
    given = {"EXPERT_PARALLEL": "16", "DETERMINISTIC": "1", "RECOMPUTE_DSA": "1", "PEAK_TFLOPS": "300", "DISTRIBUTED_OPTIMIZER": "0"}
    given |= {"SEQ_LENGTH": "2048", "WANDB_PROJECT": "", "DSA_BACKEND": "chunked", "TIMEOUT_MINUTES": "9", "LR": "0.5", "LOG_DIR": "l"}
    done = dry_run("ascend_a3", "pretrain.sh", **given)
    settings = settings_of(shlex.split(done.stdout))
    assert settings.parallel.expert_model_parallel_size == 16 and not settings.parallel.use_distributed_optimizer
    assert settings.precision.deterministic and settings.precision.recompute_dsa and settings.precision.peak_tflops == 300
    assert settings.precision.dsa_backend == "chunked" and settings.parallel.distributed_timeout_minutes == 9
    assert settings.optim.lr == 0.5 and settings.data.seq_length == 2048 and settings.output.wandb_project is None
    assert "--log-dir l " in done.stdout and "2048 tokens" in " ".join(done.stderr.split())
    assert "A step of 64 samples" in done.stderr
    less = dry_run("ascend_a3", "pretrain.sh", **given | {"GLOBAL_BATCH_SIZE": "32", "RECOMPUTE_DSA": "0", "BF16": "0"}).stderr
    assert "A step of 32 samples" in less and "fp32" in less, "the plan is that of another run"
    activations = [next(line for line in text.splitlines() if "activations" in line).split()[-1] for text in (done.stderr, less)]
    assert float(activations[1]) > 2.5 * float(activations[0]), "twice for fp32, more without recomputation"


def test_files_may_have_spaces(tmp_path: Path) -> None:
    """In the folder of a pattern; several patterns are told apart by spaces."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    files = [folder / "one 1.jsonl", folder / "two.jsonl"]
    for file in files:
        file.touch()
    for given, wanted in ((f"{folder}/*.jsonl", files), (str(files[0]), files[:1])):
        text, _ = (shlex.split(line) for line in dry_run("ascend_a2", "data.sh", TEXT=given).stdout.splitlines())
        assert parse(PretrainCorpusSettings, text[2:], "text").input == [str(file) for file in wanted]
    text, _ = (shlex.split(line) for line in dry_run("ascend_a2", "data.sh", TEXT="a.jsonl b.jsonl").stdout.splitlines())
    assert text[text.index("--input") + 1 :][:2] == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_other_steps_are_commands_that_exist(folder: str) -> None:
    for script in ("export.sh", "evaluate.sh"):
        done = dry_run(folder, script)
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines():
            _, name, *argv = shlex.split(line)
            parse(cli.COMMANDS[name], argv, name)
    text, chats = (shlex.split(line) for line in dry_run(folder, "data.sh").stdout.splitlines())
    assert [Path(command[1]).name for command in (text, chats)] == ["prepare_pretrain.py", "prepare_sft.py"]
    assert parse(PretrainCorpusSettings, text[2:], "text").output_prefix == "runs/v2_lite/text"
    assert parse(SftCorpusSettings, chats[2:], "chats").seq_length == 4096


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"NNODES": "2", "MASTER_ADDR": "h"}, "HCCL_SOCKET_IFNAME is not set"),
        ({"NNODES": "2", "HCCL_SOCKET_IFNAME": "eth0"}, "MASTER_ADDR is 127.0.0.1 and there are 2 nodes"),
        ({"BASE_MODEL": ""}, "BASE_MODEL is not set"),
        ({"DATA_PATH": ""}, "DATA_PATH is not set"),
        ({"NPROC": "x"}, "NPROC must be a whole number above 0: x"),
        ({"NNODES": "0"}, "NNODES must be a whole number above 0: 0"),
        ({"NODE_RANK": "1"}, "NODE_RANK counts the nodes from 0: 1 of 1"),
        ({"DETERMINISTIC": "no"}, "DETERMINISTIC must be 0 or 1: no"),
        ({"DRY_RUN": "yes"}, "DRY_RUN must be 0 or 1: yes"),
    ],
)
def test_what_a_launch_lacks_is_named(variables: dict, words: str) -> None:
    done = dry_run("ascend_a2", "pretrain.sh", **variables)
    assert done.returncode == 2 and words in done.stderr.splitlines()[-1]


def test_ascend_variables_are_set_and_can_be_overridden() -> None:
    show = "source examples/ascend_a{}/env.sh; env"
    system = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    for number, affinity in (("2", "2"), ("3", "1")):
        done = subprocess.run(["bash", "-c", show.format(number)], env=system, capture_output=True, text=True, cwd=ROOT)
        for line in ("HCCL_CONNECT_TIMEOUT=3600", "HCCL_EXEC_TIMEOUT=3600", "CUDA_DEVICE_MAX_CONNECTIONS=1", "TASK_QUEUE_ENABLE=2",
                     "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True", "STREAMS_PER_DEVICE=32", f"CPU_AFFINITY_CONF={affinity}",
                     "WANDB_MODE=offline"):  # fmt: skip
            assert line in done.stdout.splitlines(), line
        assert "HCCL_DETERMINISTIC" not in done.stdout
    given = system | {"DETERMINISTIC": "1", "HCCL_EXEC_TIMEOUT": "60"}
    done = subprocess.run(["bash", "-c", show.format(2)], env=given, capture_output=True, text=True, cwd=ROOT)
    assert {"HCCL_DETERMINISTIC=True", "CLOSE_MATMUL_K_SHIFT=1", "PYTHONHASHSEED=1234", "HCCL_EXEC_TIMEOUT=60"} <= set(done.stdout.split())


def test_no_flag_of_ours_makes_mindspeed_patch_megatron_training() -> None:
    """It is imported under a command line without flags; that none has one of these names is the second line of defence."""
    guarded = {"npu-deterministic", "profile", "tokenizer-type", "reset-attention-mask", "async-log-allreduce", "op-cal-tflops"}
    guarded |= {"smart-swap", "swap-attention"}
    assert not {name.removeprefix("--") for name in flag_names(TrainSettings)} & guarded
