"""`dsa-upcycle prune`: the steps are found, fail in one line, and run one after the other as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patch import cli, cli_prune, errors
from megatron_patch.errors import UserError
from tests.pruning import checkpoints

ROOT = Path(__file__).parents[2]
COMMANDS = ("plan", "apply", "verify")


def call(*argv: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    command = [sys.executable, "-m", "megatron_patch", "prune", *map(str, argv)]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_usage_lists_the_commands(capsys):
    assert cli.dispatch(["prune", "--help"]) == errors.EXIT_OK
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)
    assert cli.dispatch(["prune"]) == errors.EXIT_USER


@pytest.mark.parametrize("name", COMMANDS)
def test_help_and_example(name, capsys, monkeypatch):
    with pytest.raises(SystemExit) as end:
        cli.dispatch(["prune", name, "--help"])
    assert end.value.code == 0 and f"Example: dsa-upcycle prune {name}" in capsys.readouterr().out
    text = cli_prune.COMMANDS[name].__doc__
    example = text[text.index("Example: ") + len("Example: ") :].split()
    called: list[object] = []
    monkeypatch.setattr(cli_prune.COMMANDS[name], "__call__", lambda self: called.append(self))
    cli.dispatch(example[1:])
    assert len(called) == 1


@pytest.mark.parametrize(
    "argv, words",
    [
        (["pln"], "unknown command prune pln; did you mean plan"),
        (["plan", "--model", "m"], "required and missing: --keep"),
        (["plan", "--model", "m", "--keep", "8", "--critreion", "reap"], "did you mean --criterion"),
        (["plan", "--model", "no/such", "--keep", "8"], "must hold config.json"),
    ],
)
def test_mistakes(argv, words):
    with pytest.raises(UserError, match=words):
        cli.dispatch(["prune", *argv])


def test_the_commands_one_after_the_other(tmp_path):
    model = checkpoints.make(tmp_path / "model", "deepseek_v32")
    stats = checkpoints.make_statistics(model, tmp_path / "stats.safetensors")
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    done = call("plan", "--model", model, "--keep", 10, "--check-only")
    assert (
        done.returncode == 2 and done.stderr.startswith("error: --keep must satisfy: ") and done.stderr.count("\n") == 1
    )
    done = call(
        "plan", "--model", model, "--stats", stats, "--keep", 8, "--criterion", "reap", "--source-weights", "code=2", "chat=0.5",
        "--protect", "1:0,1", "all:15", "--target", "ascend", "--ep", 8, "--device-memory-gb", "0.0001", "--output", plan,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for word in (
        "routed traffic kept",
        "weights:",
        "devices of 0.0001 GB",
        "warning (ascend_expert_count)",
        "vllm-ascend issue 5310",
    ):
        assert word in done.stdout, done.stdout
    content = json.loads(plan.read_text())
    assert {0, 1, 15} <= set(content["layers"]["1"]["kept"]) and 15 in content["layers"]["2"]["kept"]
    done = call("apply", "--model", model, "--plan", plan, "--output", out)
    assert done.returncode == 0, done.stderr
    assert "pruned to 8 of 16 experts" in done.stdout
    done = call(
        "verify", "--model", model, "--pruned", out, "--plan", plan, "--no-logits", "--json", tmp_path / "v.json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (out / "README.md").write_text("other")
    done = call("verify", "--model", model, "--pruned", out, "--plan", plan, "--no-logits")
    assert done.returncode == 2 and "README.md is not the source's" in done.stdout
