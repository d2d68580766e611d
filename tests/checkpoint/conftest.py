from pathlib import Path

import pytest

from megatron_patch.checkpoint.export import export
from tests.checkpoint.runs import write_run
from tests.tiny import make_tiny_base, make_tiny_tokenizer


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A tiny base with its tokenizer; read only."""
    path = make_tiny_base(tmp_path_factory.mktemp("journey") / "base")
    make_tiny_tokenizer(path)
    (path / "LICENSE-MODEL").write_text("a licence")
    (path / "modeling_deepseek.py").write_text("raise RuntimeError('code of a model directory ran')")
    return path


@pytest.fixture(scope="session")
def run(base) -> Path:
    """A --save directory with one iteration of it; read only."""
    return write_run(base.parent / "save", base)


@pytest.fixture(scope="session")
def exported(base, run) -> Path:
    """Its export; read only."""
    export(run, base, base.parent / "export", progress=False)
    return base.parent / "export"


@pytest.fixture(scope="session")
def native(base, run) -> Path:
    """Its export in the native layout; read only."""
    export(run, base, base.parent / "native", layout="native", progress=False)
    return base.parent / "native"
