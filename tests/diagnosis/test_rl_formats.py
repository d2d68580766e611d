"""Every format of verl's, whole, cut and damaged: the same rows come back, and what is lost is counted."""

import json
import math
from pathlib import Path

import pytest

from megatron_patch.diagnosis.rl_formats import detect, read_console, read_jsonl, read_tensorboard, read_wandb
from tests.diagnosis.verl_logs import (
    Rows,
    console_line,
    healthy,
    write_console,
    write_jsonl,
    write_tensorboard,
    write_wandb,
)


@pytest.fixture
def rows() -> Rows:
    rows = healthy(3, 30)
    rows[7]["actor/grad_norm"] = math.nan
    rows[9]["critic/rewards/mean"] = -math.inf
    rows[11]["actor/lr"] = 1e-07
    return rows


def equal(read: list, rows: Rows, rel: float = 0.0, abs_: float = 0.0) -> bool:
    """The same steps, names and values; NaN equals NaN."""
    assert [step for step, _ in read] == list(rows)
    for step, values in read:
        assert values == pytest.approx(rows[step], rel=rel, abs=abs_, nan_ok=True), step
    return True


@pytest.mark.parametrize("ray", [True, False])
@pytest.mark.parametrize("style", ["plain", "numpy"])
def test_console(tmp_path: Path, rows: Rows, style: str, ray: bool) -> None:
    reading = read_console(write_console(tmp_path / "train.log", rows, style, ray))
    assert equal(reading.rows, rows)
    assert reading.unreadable == 0


def test_console_of_old_releases_has_three_decimals(tmp_path: Path) -> None:
    rows = healthy(4, 30, old_names=True)
    reading = read_console(write_console(tmp_path / "train.log", rows, "old"))
    assert equal(reading.rows, rows, abs_=0.0005)
    assert "actor/entropy_loss" in reading.rows[5][1]


@pytest.mark.parametrize(
    "line, step, values",
    [
        ("step:1 - a/b:0.5 - c:np.float32(1.5)", 1, {"a/b": 0.5, "c": 1.5}),
        ("step:1 - a/b:nan - c:np.float64(inf) - d:-inf", 1, {"a/b": math.nan, "c": math.inf, "d": -math.inf}),
        ("step:2 - flag:True - n:np.int64(3)", 2, {"flag": 1.0, "n": 3.0}),
        ("step:3 - val-core/lighteval/MATH: algebra/acc/mean@1:0.25 - x:1", 3, {"val-core/lighteval/MATH: algebra/acc/mean@1": 0.25, "x": 1.0}),
        ("step:3 - x:1e-06(TaskRunner pid=1) Training Progress:  5%|5 | 1/20 [00:30<09:30, 30.0s/it]", 3, {"x": 1e-06}),
        ("Training Progress:   0%|          | 0/435 [00:00<?, ?it/s]step:4 - x:2.", 4, {"x": 2.0}),
        ("[2026-01-05 10:00:00] INFO: step:5 - training/global_step:5 - x:0.100", 5, {"training/global_step": 5.0, "x": 0.1}),
    ],
)  # fmt: skip
def test_console_lines(tmp_path: Path, line: str, step: int, values: dict) -> None:
    file = tmp_path / "x.log"
    file.write_text(line + "\n")
    reading = read_console(file)
    assert [read for read, _ in reading.rows] == [step]
    assert reading.rows[0][1] == pytest.approx(values, nan_ok=True)
    assert reading.unreadable == 0


def test_console_passes_over_other_lines(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_text("training/global_step:34 - x:1\nmy_step:3 - y:2\nstep: 3 - x:1\nepoch 1 step:9\nstep:1 - x:1\n")
    reading = read_console(file)
    assert reading.rows == [(1, {"x": 1.0})] and reading.unreadable == 0


def test_console_two_lines_that_lost_their_line_end(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_text("step:1 - x:1.5step:2 - x:2.5\n")
    assert read_console(file).rows == [(1, {"x": 1.5}), (2, {"x": 2.5})]


def test_console_cut_within_a_number(tmp_path: Path, rows: Rows) -> None:
    """`response_length/mean:1267.0` cut to `12` would look like a collapse."""
    line = console_line(31, {"actor/grad_norm": 0.5, "response_length/mean": 1267.0})
    file = write_console(tmp_path / "x.log", rows)
    with file.open("a") as out:
        out.write(line[:-4])
    reading = read_console(file)
    assert reading.rows[-1] == (31, {"actor/grad_norm": 0.5})
    assert reading.unreadable == 1 and "the file ends within it" in reading.first_unreadable


def test_console_damaged_piece_keeps_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_bytes(b"step:1 - x:1.5 - actor/gr\xff\xfe - y:2.0\nstep:2 - x:1.6 - z:abc - y:2.1\n")
    reading = read_console(file)
    assert reading.rows == [(1, {"x": 1.5, "y": 2.0}), (2, {"x": 1.6, "y": 2.1})]
    assert reading.unreadable == 2 and reading.first_unreadable.startswith("line 1: no name:value in ")


def test_jsonl(tmp_path: Path, rows: Rows) -> None:
    reading = read_jsonl(write_jsonl(tmp_path / "grpo.jsonl", rows))
    rows[9]["critic/rewards/mean"] = math.nan  # orjson has null for both
    assert equal(reading.rows, rows)
    assert reading.unreadable == 0


def test_jsonl_cut_and_damaged(tmp_path: Path, rows: Rows) -> None:
    file = write_jsonl(tmp_path / "grpo.jsonl", rows)
    lines = file.read_text().splitlines()
    lines[3], lines[5] = lines[3][:50], json.dumps([1, 2])
    file.write_text("\n".join(lines)[:-20])
    reading = read_jsonl(file)
    assert len(reading.rows) == len(rows) - 3
    assert reading.unreadable == 3 and reading.first_unreadable.startswith("line 4")


def test_tensorboard(tmp_path: Path, rows: Rows) -> None:
    reading = read_tensorboard(write_tensorboard(tmp_path, rows))
    assert equal(reading.rows, rows, rel=1e-6)  # events hold single precision
    assert reading.unreadable == 0


def test_tensorboard_as_torch_writes_it(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    for step in (1, 2):
        writer.add_scalar("actor/grad_norm", 0.5 * step, step)
        writer.add_scalar("critic/rewards/mean", math.nan, step)
        writer.add_text("val/generations", "**Input:** 1 + 1", step)
    writer.close()
    reading = read_tensorboard(next(tmp_path.iterdir()))
    expected = {step: {"actor/grad_norm": 0.5 * step, "critic/rewards/mean": math.nan} for step in (1, 2)}
    assert equal(reading.rows, expected)


def test_tensorboard_cut_and_damaged(tmp_path: Path, rows: Rows) -> None:
    file = write_tensorboard(tmp_path, rows)
    data = file.read_bytes()
    file.write_bytes(data[:-5])
    cut = read_tensorboard(file)
    assert len(cut.rows) == len(rows) and cut.unreadable == 1
    middle = len(data) // 2
    file.write_bytes(data[:middle] + b"\x00\x01\x02" + data[middle + 3 :])
    damaged = read_tensorboard(file)
    assert 5 < len(damaged.rows) < len(rows) and damaged.unreadable == 1


def test_wandb(tmp_path: Path) -> None:
    """More than one 32 KiB block, so that records run over the blocks' ends; then cut, then damaged."""
    rows = healthy(5, 60)
    rows[7]["actor/grad_norm"] = math.nan
    rows[9]["critic/rewards/mean"] = -math.inf
    file = write_wandb(tmp_path, rows)
    reading = read_wandb(file)
    assert equal(reading.rows, rows)
    assert reading.unreadable == 0 and file.stat().st_size > 3 * 32768

    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    cut = read_wandb(file)
    assert 20 < len(cut.rows) < 50 and cut.unreadable == 1

    at = data.index(b"_step", len(data) // 3)
    file.write_bytes(data[:at] + b"?" + data[at + 1 :])
    damaged = read_wandb(file)
    assert len(damaged.rows) >= len(rows) - 2 and damaged.unreadable >= 1
    assert "wrong checksum" in damaged.first_unreadable


def test_detect_by_content(tmp_path: Path, rows: Rows) -> None:
    assert detect(write_jsonl(tmp_path / "grpo.log", rows)) == "jsonl"
    assert detect(write_console(tmp_path / "train", rows)) == "console"
    assert detect(write_tensorboard(tmp_path / "tb", rows)) == "tensorboard"
    other = tmp_path / "rollouts.jsonl"
    other.write_text('{"step": 1, "input": "1 + 1", "score": 0.0}\n')
    assert detect(other) is None
    weights = tmp_path / "model.log"
    weights.write_bytes(b"\0\1\2step:1 - x:1\n")
    assert detect(weights) is None
    odd = write_console(tmp_path / "nohup.1", rows)
    assert detect(odd) is None and detect(odd, certain=True) == "console"
