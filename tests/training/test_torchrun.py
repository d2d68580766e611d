"""The training program under torchrun with two ranks, as users start it: signals, and mistakes that are said once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--seq-length 64 --index-topk 8 --index-n-heads 4 --index-head-dim 16 --global-batch-size 4 --eval-interval 0 "
    "--log-interval 1 --device cpu --split 80,20 --train-iters 5000"
).split()


PATIENCE = 400.0  # seconds; on a busy machine the imports of a rank alone take one minute


@pytest.fixture
def start(tiny_base, text_prefix, tmp_path):
    """Start pretraining on two ranks with further flags; what is left of it is killed afterwards."""
    started = []

    def torchrun(*flags: str, restarts: int = 0) -> subprocess.Popen:
        inputs = ["--base-model", str(tiny_base), "--data-path", text_prefix, "--save", str(tmp_path / "save")]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                   "--max-restarts", str(restarts), ROOT / "pretrain_upcycle.py", *inputs, *FLAGS, *flags]  # fmt: skip
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        output = (tmp_path / "output").open("w")
        started.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True))
        return started[-1]

    yield torchrun
    for process in started:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for member in [*family, process]:
            member.kill()
        process.wait()


def until(true, process: subprocess.Popen, output: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)


def test_sigterm_to_one_rank_saves_and_ends_both_with_0(start, tmp_path):
    process = start()
    save, output = tmp_path / "save", tmp_path / "output"
    metrics = save / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text(), process, output)
    workers = psutil.Process(process.pid).children(recursive=True)
    [second] = [each for each in workers if each.environ().get("RANK") == "1"]
    second.send_signal(signal.SIGTERM)
    assert process.wait(timeout=PATIENCE) == 0, output.read_text()
    said = output.read_text()
    assert said.count("saved iteration") == 1 and "(received SIGTERM)" in said, said
    [saved] = save.glob("iter_*")
    assert int((save / "latest_checkpointed_iteration.txt").read_text()) == int(saved.name.removeprefix("iter_")) > 0
    assert not any(each.is_running() for each in workers)


@pytest.mark.slow
def test_a_killed_rank_is_restarted_from_the_last_checkpoint(start, tmp_path):
    """The same command again, with nothing in it that says so: it goes on with what it saved."""
    save, output = tmp_path / "save", tmp_path / "output"
    process = start("--train-iters", "60", "--save-interval", "5", "--expert-model-parallel-size", "2", restarts=2)
    until(lambda: (save / "iter_0000010").exists(), process, output)
    workers = psutil.Process(process.pid).children(recursive=True)
    [second] = [each for each in workers if each.environ().get("RANK") == "1"]
    second.kill()
    assert process.wait(timeout=PATIENCE) == 0, output.read_text()
    said = output.read_text()
    assert said.count("note: torchrun starts this run again") == 1 and "goes on with what was saved" in said, said
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, 61))
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "60\n"


@pytest.mark.slow
def test_a_directory_that_was_refused_is_refused_again(start, tmp_path):
    """Else the second start would write into somebody's files."""
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "notes.txt").write_text("mine")
    process = start("--train-iters", "5", restarts=1)
    assert process.wait(timeout=PATIENCE) == 1
    said = (tmp_path / "output").read_text()
    assert said.count("error: --save must be new or empty") == 2, said
    assert [item.name for item in (tmp_path / "save").iterdir()] == ["notes.txt"]


def test_a_wrong_flag_is_said_once(start, tmp_path):
    process = start("--min-lr", "1")
    assert process.wait(timeout=PATIENCE) == 1  # torchrun's own
    said = (tmp_path / "output").read_text()
    lines = [each for each in said.splitlines() if each.startswith("error: ")]
    assert len(lines) == 1 and lines[0].startswith("error: --min-lr"), said
    assert "exitcode  : 2" in said and not (tmp_path / "save").exists()
