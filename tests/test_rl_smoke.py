"""examples/rl_smoke: the journey on a tiny random export, and where a planted fault acts. The figures are in docs/rl_smoke.md."""

import importlib.util
import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_patch.errors import UserError
from megatron_patch.faults import Fault
from tests.diagnosis.parity.conftest import make_journey

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def rl_smoke():
    spec = importlib.util.spec_from_file_location("rl_smoke", ROOT / "examples" / "rl_smoke.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def export(device, tmp_path_factory) -> Path:
    return make_journey(tmp_path_factory.mktemp("rl"), "float32").export


def arguments(rl_smoke, export, output, **changes):
    return rl_smoke.Arguments(export, output, **({"seeds": (1,), "steps": 2, "prompts": 2, "samples": 2} | changes))


def test_rewards_are_exact(rl_smoke):
    completions = [[{"content": text}] for text in (" 97", "97.", "79", "97 97", "97")]
    assert rl_smoke.exact(completions, ["97"] * 5) == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_answers_are_the_largest_number(rl_smoke):
    for row in rl_smoke.rows(random.Random(3), 50):
        numbers = [int(word) for word in row["prompt"][-1]["content"].split()]
        assert len(set(numbers)) == 5 and int(row["answer"]) == max(numbers)


def test_a_run_moves_the_weights_and_leaves_its_files(rl_smoke, export, tmp_path, monkeypatch):
    """A reward that varies, since a random model never answers right; weights then move, and the run is on record."""
    monkeypatch.setattr(rl_smoke, "SCORED_PROMPTS", 2)
    monkeypatch.setattr(rl_smoke, "exact", lambda completions, answer, **_: [float(len(c[0]["content"]) % 2) for c in completions])
    loaded = []
    load = rl_smoke.load_model
    monkeypatch.setattr(rl_smoke, "load_model", lambda directory: loaded.append(load(directory)) or loaded[-1])
    assert rl_smoke.run(arguments(rl_smoke, export, tmp_path / "out", learning_rate=1e-2)) == 0
    assert {item.name for item in (tmp_path / "out").iterdir()} == {"rl_smoke.json", "reward.png"}
    content = json.loads((tmp_path / "out" / "rl_smoke.json").read_text())
    (run,) = content["runs"]
    assert len(run["rewards"]) == len(run["grad_norms"]) == 2 and content["fault"] is None
    before = load(rl_smoke.inspect_directory(export))
    moved = {name for (name, a), b in zip(before.named_parameters(), loaded[0].parameters(), strict=True) if not torch.equal(a, b)}
    assert moved and not any(".indexer." in name for name in moved)  # no gradient reaches an indexer


def test_a_fault_is_in_the_rollouts_only(rl_smoke, export, tmp_path, monkeypatch):
    """Generation sees it, the pass that gives the gradient does not."""
    monkeypatch.setattr(rl_smoke, "SCORED_PROMPTS", 1)
    inside, faults = {"now": False}, {"generate": [], "loss": []}
    planted = rl_smoke._with_fault

    class Marked(rl_smoke.RolloutTrainer):
        def _compute_loss(self, model, inputs):
            faults["loss"].append(inside["now"])
            return super()._compute_loss(model, inputs)

    def marking(model, fault):
        import contextlib

        @contextlib.contextmanager
        def block():
            with planted(model, fault):
                inside["now"] = True
                faults["generate"].append(fault)
                yield
                inside["now"] = False

        return block()

    monkeypatch.setattr(rl_smoke, "RolloutTrainer", Marked)
    monkeypatch.setattr(rl_smoke, "_with_fault", marking)
    rl_smoke.run(arguments(rl_smoke, export, tmp_path / "out", fault="positions_off_by_one"))
    assert set(faults["generate"]) == {Fault.POSITIONS_OFF_BY_ONE} and len(faults["generate"]) == 4  # twice scored, two steps
    assert faults["loss"] == [False, False]


def test_unknown_fault_is_refused(rl_smoke, export, tmp_path):
    with pytest.raises(UserError, match="--fault must be one that a rollout can have"):
        rl_smoke.run(arguments(rl_smoke, export, tmp_path / "out", fault="stale_topk_recompute"))
    assert not (tmp_path / "out").exists()


def test_the_script_builds_its_command_and_names_a_missing_export(tmp_path):
    script = ROOT / "examples" / "rl_smoke.sh"
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "EXPORT": str(tmp_path / "none"), "SEEDS": "4 5"}
    dry = subprocess.run(["bash", script, "--steps", "7"], env=env | {"DRY_RUN": "1"}, capture_output=True, text=True, cwd=ROOT)
    assert dry.returncode == 0 and dry.stdout.split()[-5:] == ["--seeds", "4", "5", "--steps", "7"]
    real = subprocess.run(["bash", script], env=env, capture_output=True, text=True, cwd=ROOT)
    assert real.returncode == 2 and "run bash examples/quickstart.sh first" in real.stderr
    assert os.access(script, os.X_OK)
