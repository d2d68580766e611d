"""The second environment: verl's, with the older transformers. Tests use it in a subprocess."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def verl_python() -> Path:
    """Its interpreter: `UPCYCLE_VENV_VERL`, else `.venv-verl/bin/python`. The calling test fails if there is none."""
    python = Path(os.environ.get("UPCYCLE_VENV_VERL") or REPOSITORY / ".venv-verl" / "bin" / "python")
    if python.is_file():
        return python
    message = f"the second environment (transformers 5.9.0) is missing: {python}; `bash tests/run.sh` makes it"
    if os.environ.get("UPCYCLE_ALLOW_MISSING_VENV") == "1":
        pytest.skip(message)
    pytest.fail(message + ", or set UPCYCLE_VENV_VERL to its python, or UPCYCLE_ALLOW_MISSING_VENV=1 to skip")
