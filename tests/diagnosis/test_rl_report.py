"""`dsa-upcycle rl-report` as a whole."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_patch import cli
from megatron_patch.diagnosis.rl_logs import read_run
from megatron_patch.diagnosis.rl_pages import markdown
from megatron_patch.diagnosis.rl_report import EXIT_FOUND, make_report
from megatron_patch.errors import UserError
from tests.diagnosis.verl_logs import FAULTS, healthy, ill, write_console, write_jsonl, write_tensorboard

WRITERS = {
    "console": lambda folder, rows: write_console(folder / "train.log", rows, "numpy"),
    "jsonl": lambda folder, rows: write_jsonl(folder / "grpo.jsonl", rows),
    "tensorboard": lambda folder, rows: write_tensorboard(folder / "grpo", rows),
}


def report(tmp_path: Path, *argv: object, code: int = 0) -> dict:
    output = tmp_path / "report"
    assert cli.dispatch(["rl-report", *map(str, argv), "--output", str(output)]) == code
    return json.loads((output / "rl_report.json").read_text())


@pytest.mark.parametrize("format", list(WRITERS))
def test_healthy_run(tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = report(tmp_path, WRITERS[format](tmp_path / "log", healthy(0, 120)))
    assert result["schema"] == 1 and result["symptoms"] == [] and result["not_tested"] == []
    assert result["run"]["format"] == format and result["run"]["unreadable"] == 0
    assert result["run"]["steps"] == {"first": 0, "last": 120, "count": 121, "missing": 0}
    assert result["compare"] is None and result["failed_on"] == []
    assert sorted(each.name for each in (tmp_path / "report").iterdir()) == [
        "curves.png",
        "report.md",
        "rl_report.json",
    ]
    assert (tmp_path / "report" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert "symptoms: 0; could not be tested: 0" in capsys.readouterr().out


@pytest.mark.parametrize("format", list(WRITERS))
@pytest.mark.parametrize("fault", list(FAULTS))
def test_each_symptom_in_each_format(tmp_path: Path, fault: str, format: str) -> None:
    """Detection itself is tested over many seeds; a format may round, or write NaN as null."""
    result = make_report(read_run(WRITERS[format](tmp_path, ill(fault, 1))), None)
    each = next(each for each in result["symptoms"] if each["id"] == fault)
    assert each["steps"] and len(each["steps"]) == len(each["values"]) and each["also_in_other"] is None
    assert f"| `{fault}` | {each['title']}: {each['text']} |" in markdown(result).replace("\\|", "|")


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference case: the start is bad on one framework alone, the mismatch is on both."""
    run, other = ill("mismatch", 1), ill("mismatch", 2)
    FAULTS["grad_norm_start"](run, np.random.default_rng(0))
    for step in other:
        other[step].pop("actor/entropy", None)
    run[50]["actor/kl_loss"] = math.nan
    FAULTS["entropy_collapse"](run, np.random.default_rng(0))
    FAULTS["reward_flat"](other, np.random.default_rng(0))
    result = report(
        tmp_path, write_console(tmp_path / "a.log", run), "--compare", write_jsonl(tmp_path / "b.jsonl", other)
    )
    also = {each["id"]: each["also_in_other"] for each in result["symptoms"]}
    assert also == {"non_finite": False, "grad_norm_start": False, "mismatch": True, "entropy_collapse": None}
    assert result["only_in_other"] == ["reward_flat"]
    assert result["compare"]["format"] == "jsonl"
    assert result["curves"]["grad_norm"]["start"] > 20 > result["curves"]["grad_norm"]["other_start"]
    assert result["curves"]["entropy"]["other_end"] is None
    nan = next(each for each in result["symptoms"] if each["id"] == "non_finite")
    assert nan["values"] == ["nan"] and nan["steps"] == [50]
    page = (tmp_path / "report" / "report.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert rows["mismatch"].endswith("| yes |") and rows["grad_norm_start"].endswith("| no |")
    assert rows["entropy_collapse"].endswith("| not tested |") and "Only in the other run: `reward_flat`." in page
    assert "grad_norm_start: up to" in (out := capsys.readouterr().out) and "also in the other run: no" in out


def test_json_for_ci(tmp_path: Path) -> None:
    result = report(tmp_path, write_jsonl(tmp_path / "a.jsonl", healthy(0, 50)), "--json", tmp_path / "ci" / "rl.json")
    assert json.loads((tmp_path / "ci" / "rl.json").read_text()) == result


@pytest.mark.parametrize(
    "fail_on, code, failed",
    [
        (["any"], EXIT_FOUND, ["mismatch"]),
        (["mismatch", "reward_flat"], EXIT_FOUND, ["mismatch"]),
        (["reward_flat"], 0, []),
        (["entropy_collapse"], EXIT_FOUND, ["entropy_collapse (not tested)"]),
    ],
)
def test_fail_on(tmp_path: Path, fail_on: list[str], code: int, failed: list[str]) -> None:
    rows = ill("mismatch", 1)
    for step in rows:
        rows[step].pop("actor/entropy", None)
    result = report(tmp_path, write_jsonl(tmp_path / "a.jsonl", rows), "--fail-on", *fail_on, code=code)
    assert result["failed_on"] == failed


def test_mistakes(tmp_path: Path) -> None:
    log = write_jsonl(tmp_path / "a.jsonl", healthy(0, 50))
    argv = ["rl-report", str(log), "--output", str(tmp_path / "o")]
    with pytest.raises(UserError, match="unknown mismatsch; ids: non_finite, "):
        cli.dispatch([*argv, "--fail-on", "mismatsch"])
    with pytest.raises(UserError, match="--compare must be a verl log"):
        cli.dispatch([*argv, "--compare", str(tmp_path / "no")])
    assert not (tmp_path / "o").exists()
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "x").touch()
    with pytest.raises(UserError, match="not empty"):
        cli.dispatch(argv)


def test_notes_of_a_partial_log(tmp_path: Path) -> None:
    """A killed run, restarted, cut: all of it is on the page."""
    first, second = healthy(1, 60), healthy(2, 60)
    file = write_console(tmp_path / "train.log", {step: first[step] for step in range(41)})
    again = write_console(tmp_path / "again", {step: second[step] for step in range(31, 61)})
    file.write_text(file.read_text() + again.read_text() + "step:61 - actor/grad_norm:0.1")
    result = report(tmp_path, file)
    assert result["run"]["restarts"] == [{"after": 40, "at": 31, "left_out": 10, "non_finite": 0}]
    assert result["run"]["unreadable"] == 1
    page = (tmp_path / "report" / "report.md").read_text()
    assert "restart: after step 40 the log goes on at step 31; 10 steps of the earlier attempt are left out" in page
    assert "1 lines or records could not be read; the first: " in page


def test_a_run_of_one_step(tmp_path: Path) -> None:
    """After a change one looks at the first step: most cannot be tested, the mismatch can."""
    rows = {1: healthy(0, 50)[1] | {"training/rollout_probs_diff_mean": 0.05}}
    result = report(tmp_path, write_console(tmp_path / "a.log", rows))
    assert [each["id"] for each in result["symptoms"]] == ["mismatch"]
    assert {each["id"] for each in result["not_tested"]} >= {"reward_flat", "entropy_collapse", "step_time"}
    assert "## Could not be tested" in (tmp_path / "report" / "report.md").read_text()
