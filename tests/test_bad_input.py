"""Whatever is wrong with an input: exit code 2, one line that names rule, value and remedy, nothing half-written.

Each case goes through the command as a user gives it. Most run in this process, where the table takes a minute.
"""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_patch import cli, errors
from tests.bad_input import data_cases, flag_cases, model_cases
from tests.bad_input.world import Originals, World, edit_json

ROOT = Path(__file__).parents[1]
CASES = data_cases.CASES | model_cases.CASES | flag_cases.CASES
IN_A_PROCESS_OF_ITS_OWN = (
    "a key twice", "weight 0", "show a truncated .bin", "text of another tokenizer", "a token beyond the vocabulary",
    "weights truncated", "check foreign code", "two RoPE thetas", "evaluate nothing", "an unknown flag",
)  # fmt: skip
PROGRESS = re.compile(r"\d+%\||\d+(\.\d+)?[kMG]?(B|it|tensor|step|row|tok)? \[|^note: ")
# torch says so where it finds a CUDA compiler and no GPU; nothing of ours imports what says it on purpose.
CUDA_COMPILER = re.compile(r"^W\d{4} .*cpp_extension\.py:\d+\] No CUDA runtime is found")


@pytest.fixture(scope="session")
def originals(tmp_path_factory) -> Originals:
    return Originals.make(tmp_path_factory.mktemp("originals"))


@pytest.fixture
def world(originals, tmp_path) -> World:
    return World(tmp_path, originals)


def script(name: str) -> Path:
    return ROOT / f"{name}.py" if name.endswith("_upcycle") else ROOT / "data" / f"{name}.py"


def entry(command: list[str]) -> Callable[[], int | None]:
    """The `main` that the command's script hands to `errors.run`."""
    name, *arguments = command
    if name == "dsa-upcycle":
        return lambda: cli.dispatch(arguments)
    spec = importlib.util.spec_from_file_location(name, script(name))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def run_here(command: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", command)
    return errors.run(entry(command))


def contents(path: Path) -> dict[str, str]:
    """Every file and filled directory below, with its hash."""
    return {
        str(item.relative_to(path)): hashlib.sha256(item.read_bytes()).hexdigest() if item.is_file() else ""
        for item in path.rglob("*")
        if not item.is_dir() or any(item.iterdir())
    }


def check_end(case: str, code: int, err: str) -> None:
    lines = [
        line.strip()
        for line in re.split(r"[\r\n]", err)
        if line.strip() and not PROGRESS.search(line) and not CUDA_COMPILER.search(line)
    ]
    assert len(lines) == 1 and lines[0].startswith("error: "), err[-2000:]
    assert code == errors.EXIT_USER
    assert re.search(CASES[case].message, lines[0]), lines[0]
    assert "; " in lines[0] or "see " in lines[0], f"no remedy: {lines[0]}"
    assert len(lines[0]) < 1000, "the line is longer than anyone reads"


def test_names_are_of_one_case_each() -> None:
    tables = (data_cases.CASES, model_cases.CASES, flag_cases.CASES)
    assert len(CASES) == sum(map(len, tables)) >= 60


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_nothing_written(case: str, world: World, device, monkeypatch, capfd) -> None:
    command = CASES[case].build(world)
    before = contents(world.path)
    capfd.readouterr()
    code = run_here(command, monkeypatch)
    check_end(case, code, capfd.readouterr().err)
    assert contents(world.path) == before


@pytest.mark.parametrize("case", IN_A_PROCESS_OF_ITS_OWN)
def test_the_same_from_a_shell(case: str, world: World) -> None:
    """Also that no library's warning of a fresh process stands beside the line."""
    name, *arguments = CASES[case].build(world)
    before = contents(world.path)
    run = ["-m", "megatron_patch"] if name == "dsa-upcycle" else [str(script(name))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *run, *arguments], env=environment, capture_output=True, text=True, cwd=ROOT)
    check_end(case, done.returncode, done.stderr)
    assert contents(world.path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read and write everything")
@pytest.mark.parametrize("spoil", ["input", "output"])
def test_what_the_system_refuses(spoil: str, world: World, monkeypatch, capfd) -> None:
    source = world.file("a.jsonl", '{"text": "a"}\n')
    world.out.mkdir()
    (source if spoil == "input" else world.out).chmod(0o000 if spoil == "input" else 0o500)
    assert run_here(world.prepare_pretrain(source), monkeypatch) == errors.EXIT_USER
    assert "permissions" in capfd.readouterr().err


# Odd, and right


def test_a_line_of_10_mb_is_one_document(world: World, monkeypatch, capfd) -> None:
    row = json.dumps({"raw": "x" * 9_000_000, "text": "0123456789abcde\n" * 62_500})
    assert run_here(world.prepare_pretrain(world.file("a.jsonl", row)), monkeypatch) == errors.EXIT_OK
    report = json.loads((world.out / "P.json").read_text())
    assert (report["documents"], report["tokens"]) == (1, 1_000_002)


def new_rope(world: World) -> None:
    """The config as transformers 5 writes it: `rope_parameters`, and no `rope_scaling`."""
    from transformers import DeepseekV2Config

    DeepseekV2Config.from_pretrained(world.base).save_pretrained(world.base)
    edit_json(world.base / "config.json", lambda c: c | {"architectures": ["DeepseekV2ForCausalLM"]})
    config = json.loads((world.base / "config.json").read_text())
    assert "rope_parameters" in config and "rope_scaling" not in config


def both_ropes(world: World) -> None:
    old = json.loads((world.base / "config.json").read_text())
    new_rope(world)
    edit_json(world.base / "config.json", lambda c: c | {key: old[key] for key in ("rope_scaling", "rope_theta")})


def empty_new_rope(world: World) -> None:
    edit_json(world.base / "config.json", lambda c: c | {"rope_parameters": {}})


FORMS: dict[str, Callable[[World], None]] = {
    "as published": lambda world: None,
    "experts over shards": model_cases.split_experts,
    "linked files": model_cases.linked,
    "rope_parameters": new_rope,
    "both forms of RoPE": both_ropes,
    "an empty rope_parameters": empty_new_rope,
}


def test_forms_of_one_base_are_one_model(originals, tmp_path, device, monkeypatch, capfd) -> None:
    """The same frozen weights, and the same losses to the last digit (RoPE is in them)."""
    found = {}
    for form, change in FORMS.items():
        world = World(tmp_path / form.replace(" ", "_"), originals)
        world.path.mkdir()
        _ = world.base
        change(world)
        command = world.train("--train-iters", "1", "--eval-interval", "1", "--eval-iters", "1")
        assert run_here(command, monkeypatch) == errors.EXIT_OK, (form, capfd.readouterr().err)
        rows = [json.loads(line) for line in (world.out / "metrics.jsonl").read_text().splitlines()]
        found[form] = [(world.out / "frozen.sha256").read_text(), *(row["lm_loss"] for row in rows)]
    assert all(each == found["as published"] for each in found.values()), found
