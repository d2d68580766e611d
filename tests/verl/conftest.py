"""Small exports for this room, and a way to run our scripts in verl's environment."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron_patch.checkpoint.export import export
from megatron_patch.data.rl_corpus import RlCorpusSettings, prepare_rl
from tests.checkpoint.runs import write_run
from tests.hf_model.other_environment import verl_python
from tests.tiny import make_tiny_base, make_tiny_tokenizer

ROOT = Path(__file__).parents[2]
INSIDE = Path(__file__).parent / "inside"


@pytest.fixture(scope="session")
def exports(tmp_path_factory) -> dict[str, Path]:
    """One training run as a native and as a hybrid export; read only."""
    work = tmp_path_factory.mktemp("verl")
    base = make_tiny_tokenizer(make_tiny_base(work / "base"))
    save = write_run(work / "save", base)
    for layout in ("native", "hybrid"):
        export(save, base, work / layout, layout=layout, progress=False)
    return {layout: work / layout for layout in ("native", "hybrid")}


@pytest.fixture(scope="session")
def native(exports) -> Path:
    return exports["native"]


@pytest.fixture(scope="session")
def rl_data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("verl") / "data"
    prepare_rl(RlCorpusSettings(output=str(path), rows=60, validation_share=0.2))
    return path


def clean_environment(work: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONHOME")}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hf"),  # also where `datasets` caches what it reads
        "HF_MODULES_CACHE": str(work / "modules"),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        **more,
    }


def run_inside(script: str, work: Path, **given) -> dict:
    """What `inside/SCRIPT` reports: it is called with a JSON file of `given`, by verl's Python, and writes another."""
    (work / "given.json").write_text(json.dumps(given, default=str))
    command = [verl_python(), "-W", "ignore", INSIDE / script, work / "given.json", work / "report.json"]
    done = subprocess.run(command, env=clean_environment(work), cwd=work, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return json.loads((work / "report.json").read_text())
