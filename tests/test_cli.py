"""`dsa-upcycle`: the commands are found, answer fast, and fail in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patch import __version__, cli, errors
from megatron_patch.errors import UserError

ROOT = Path(__file__).parents[1]
V2_LITE = ROOT / "tests" / "data" / "deepseek_v2_lite_config.json"


def call(*argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.run([sys.executable, "-m", "megatron_patch", *argv], env=env, capture_output=True, text=True)


def test_usage_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["--help"]) == errors.EXIT_OK
    out = capsys.readouterr().out
    assert __version__ in out
    assert all(f"  {name} " in out for name in cli.COMMANDS)
    assert max(map(len, out.splitlines())) <= 120


def test_no_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch([]) == errors.EXIT_USER
    assert "usage" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["--version"]) == errors.EXIT_OK
    assert capsys.readouterr().out.strip() == __version__


def test_unknown_command_names_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown command exprot; did you mean export; commands: demo-base, "):
        cli.dispatch(["exprot"])


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_help_of_a_command_has_a_line_and_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.dispatch([name, "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert f"Example: dsa-upcycle {name}" in out
    documented = [line for line in cli.COMMANDS[name].__doc__.splitlines() if line.strip()]
    assert documented[0] in out


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_example_of_a_command_parses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples are what people paste: each must be accepted as it stands."""
    text = cli.COMMANDS[name].__doc__
    example = text[text.index("Example: ") + len("Example: ") :].split()
    called: list[object] = []
    monkeypatch.setattr(cli.COMMANDS[name], "__call__", lambda self: called.append(self))
    assert example[:2] == ["dsa-upcycle", name]
    cli.dispatch(example[1:])
    assert len(called) == 1


@pytest.mark.parametrize(
    "argv, module, function, expected",
    [
        (
            ["demo-base", "--output", "o", "--fast"],
            "megatron_patch.demo.demo_base", "run", ((Path("o"),), {"fast": True, "specialised_experts": False}),
        ),
        (
            ["export", "--checkpoint", "c", "--base", "b", "--output", "o", "--iteration", "7", "--base-shards", "symlink"],
            "megatron_patch.checkpoint.export", "export",
            ((Path("c"), Path("b"), Path("o")), {"iteration": 7, "layout": "hybrid", "base_indexers": None, "base_shards": "symlink"}),
        ),
        (
            ["check", "e", "--base", "b", "--json", "j"],
            "megatron_patch.checkpoint.check", "check", ((Path("e"), Path("b"), Path("j")), {}),
        ),
    ],
)  # fmt: skip
def test_flags_reach_the_room(
    argv: list[str], module: str, function: str, expected: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple] = []

    def spy(*args, **kwargs) -> int:
        seen.append((args, kwargs))
        return 0

    monkeypatch.setattr(f"{module}.{function}", spy)
    assert cli.dispatch(argv) == 0
    assert seen == [expected]


def test_evaluate_passes_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound to the real signature: a renamed argument there fails here."""
    import inspect

    from megatron_patch.evaluation import evaluate

    signature = inspect.signature(evaluate.run)
    seen: dict[str, object] = {}
    monkeypatch.setattr(evaluate, "run", lambda **kwargs: seen.update(signature.bind(**kwargs).arguments))
    cli.dispatch(["evaluate", "--base", "b", "--model", "m", "--suite", "s", "--output", "o", "--limit", "5"])
    assert seen["limit"] == 5 and seen["trust_remote_code"] is False
    defaults = {name: p.default for name, p in signature.parameters.items() if p.default is not inspect.Parameter.empty}
    assert {name: seen[name] for name in defaults if name != "limit"} == {n: d for n, d in defaults.items() if n != "limit"}


def test_sigterm_leaves_nothing_half_written(tmp_path: Path) -> None:
    """The scripts hand Ctrl-C on as SIGTERM; an export of the real base would leave 31 GB in a hidden directory."""
    code = """
import os, signal, sys
from pathlib import Path
from megatron_patch import cli
from megatron_patch.io.publish import atomic_directory

def export(argv):
    with atomic_directory(Path(argv[0])) as partial:
        (partial / "shard").touch()
        if os.fork() == 0:  # a worker of this process dies of it as ever
            os.kill(os.getpid(), signal.SIGTERM)
        print(signal.Signals(os.WTERMSIG(os.wait()[1])).name, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

cli.dispatch = export
cli.main()
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "out"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (143, "SIGTERM\n", "")
    assert os.listdir(tmp_path) == []


def test_plan_runs_as_a_command(tmp_path: Path) -> None:
    file = tmp_path / "layout.json"
    done = call("plan", "--base", str(V2_LITE), "--index-n-heads", "32", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text())["parameters"]["base"] == 15_706_484_224
    assert "mla*27,dsa*2" in done.stdout


@pytest.mark.parametrize(
    "argv, words",
    [
        (["plan", "--base", "no/such/place"], ["config.json", "no/such/place"]),
        (["plan", "--bsae", "x"], ["--bsae", "did you mean --base"]),
        (["plan"], ["--base"]),
        (["plna"], ["did you mean plan"]),
        (["plan", "--base", str(V2_LITE), "--layer-pattern", "mla*27,dse"], ["dse", "mla*27,dsa*2"]),
        (["plan", "--base", str(V2_LITE), "--seq-length", "0"], ["--seq-length", "0"]),
    ],
)
def test_mistakes_are_one_line_with_exit_code_2(argv: list[str], words: list[str]) -> None:
    done = call(*argv)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert all(word in lines[0] for word in words), lines[0]
