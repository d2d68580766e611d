"""From a path to one run: which files are read, restarts, copies, and two runs that must not be mixed."""

import math
import os
from pathlib import Path

import pytest

from megatron_patch.diagnosis import rl_logs
from megatron_patch.diagnosis.rl_logs import read_run
from megatron_patch.errors import UserError
from tests.diagnosis.verl_logs import healthy, write_console, write_jsonl, write_tensorboard, write_wandb

ROWS = healthy(8, 60)


def part(first: int, last: int, rows=ROWS):
    return {step: rows[step] for step in range(first, last + 1)}


def age(file: Path, seconds: int) -> Path:
    os.utime(file, (1_760_000_000 + seconds,) * 2)
    return file


def test_one_file(tmp_path: Path) -> None:
    run = read_run(write_jsonl(tmp_path / "grpo.jsonl", ROWS))
    assert run.format == "jsonl" and run.rows == ROWS and not run.restarts and not run.also_there


def test_directory_with_every_format(tmp_path: Path) -> None:
    """The same run four times: the most exact one that covers most is read, the others are named."""
    write_console(tmp_path / "train.log", ROWS)
    write_tensorboard(tmp_path / "tensorboard_log" / "verl" / "grpo", ROWS)
    write_wandb(tmp_path, ROWS)
    run = read_run(tmp_path)
    assert run.format == "wandb" and list(run.rows) == list(ROWS)
    assert any("(console, 61 steps): wandb covers as many steps or more" in each for each in run.also_there)
    write_jsonl(tmp_path / "verl" / "grpo.jsonl", ROWS)
    assert read_run(tmp_path).format == "jsonl"


def test_the_format_that_covers_most_is_read(tmp_path: Path) -> None:
    """verl opens its JSONL anew at each start, so that after a restart it holds the end alone."""
    write_console(tmp_path / "train.log", ROWS)
    write_jsonl(tmp_path / "grpo.jsonl", part(40, 60))
    run = read_run(tmp_path)
    assert run.format == "console" and len(run.rows) == 61


def test_restart_within_a_console_log(tmp_path: Path) -> None:
    second = healthy(9, 60)
    bad = part(1, 40)
    bad[38] = {**bad[38], "actor/grad_norm": math.nan}
    first = write_console(tmp_path / "1.log", bad)
    again = write_console(
        tmp_path / "2.log", {30: second[0], **part(31, 35, second)}
    )  # validates at 30 before it trains
    both = tmp_path / "both.txt"
    both.write_text(first.read_text() + again.read_text())
    run = read_run(both)
    (restart,) = run.restarts
    assert (restart.after, restart.at, restart.left_out, restart.non_finite) == (40, 31, 10, 1)
    assert list(run.rows) == list(range(1, 36))
    assert (
        run.rows[30]["actor/grad_norm"] == ROWS[30]["actor/grad_norm"]
        and "val-core/openai/gsm8k/acc/mean@1" in run.rows[30]
    )
    assert run.rows[33] == second[33]


def test_continuation_in_a_second_file(tmp_path: Path) -> None:
    age(write_console(tmp_path / "z_first.log", part(1, 40)), 0)
    age(write_console(tmp_path / "a_second.log", part(36, 60)), 100)
    run = read_run(tmp_path)
    assert [file.path.name for file in run.files] == ["z_first.log", "a_second.log"]
    assert run.restarts[0].after == 40 and run.restarts[0].at == 36 and len(run.rows) == 60


def test_tensorboard_restart_in_the_same_directory(tmp_path: Path) -> None:
    """Event files of one directory are attempts of one run, in the order of the time in their names."""
    second = healthy(9, 60)
    write_tensorboard(tmp_path, part(1, 20, second), started=1_760_009_999)
    write_tensorboard(tmp_path, part(1, 30), started=1_760_000_000)
    run = read_run(tmp_path)
    assert run.restarts[0].after == 30 and run.restarts[0].at == 1 and run.restarts[0].left_out == 30
    assert run.rows[5] == pytest.approx(second[5], rel=1e-6) and list(run.rows)[-1] == 20


def test_a_copy_is_left_out(tmp_path: Path) -> None:
    """Ray keeps the driver's lines in the worker's file as well."""
    write_console(tmp_path / "job-driver-raysubmit_1.log", ROWS)
    write_console(tmp_path / "worker-1-01000000-42.out", part(0, 50), ray=False)
    run = read_run(tmp_path)
    assert [file.path.name for file in run.files] == ["job-driver-raysubmit_1.log"] and not run.restarts
    assert len(run.also_there) == 1 and "the same lines as" in run.also_there[0]


@pytest.mark.parametrize("write", [write_console, write_jsonl])
def test_two_runs_are_not_mixed(tmp_path: Path, write) -> None:
    write(tmp_path / "cuda.log", ROWS)
    write(tmp_path / "npu.log", healthy(9, 60))
    with pytest.raises(
        UserError, match=r"RUN must be one run: .* both start at step 1 with different values; give one"
    ):
        read_run(tmp_path)


def test_two_tensorboard_runs_are_not_mixed(tmp_path: Path) -> None:
    write_tensorboard(tmp_path / "cuda", ROWS)
    write_tensorboard(tmp_path / "npu", healthy(9, 60))
    with pytest.raises(UserError, match="must be one run"):
        read_run(tmp_path, "--compare")
    assert len(read_run(tmp_path / "npu").rows) == 61


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_run(tmp_path / "no")
    with pytest.raises(UserError, match="no line `step:N"):
        read_run(tmp_path)
    (tmp_path / "train.log").write_text("Loading checkpoint shards: 100%\n")
    for path in (tmp_path, tmp_path / "train.log"):
        with pytest.raises(UserError, match="--compare must be verl's console text"):
            read_run(path, "--compare")


def test_a_huge_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_logs, "MAX_FILES", 3)
    for i in range(4):
        (tmp_path / f"{i}.log").touch()
    with pytest.raises(UserError, match="more than 3 files"):
        read_run(tmp_path)
