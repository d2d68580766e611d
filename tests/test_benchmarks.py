"""Benchmarks stay runnable: what docs quote figures of must not break when the code beneath it moves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMON = ("sides.py", "random_model.py")
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("[!_]*.py") if path.name not in COMMON)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_imports_and_explains_itself(script: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run([sys.executable, str(script), "--help"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
    assert "--json" in done.stdout
