"""The launch scripts, run dry: their overrides without verl."""

import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.stem: path for path in sorted((ROOT / "examples" / "verl").glob("grpo_*.sh"))}


def dry(script: str, *argv: str, python: str = "/nowhere/python", **variables: str) -> subprocess.CompletedProcess[str]:
    """With nothing but PATH and the named variables in the environment, and no verl unless `python` has it."""
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "DRY_RUN": "1",
        "PYTHON": python,
        "MODEL": "m",
        "DATA": "d",
        **variables,
    }
    return subprocess.run(["bash", SCRIPTS[script], *argv], env=env, capture_output=True, text=True, cwd=ROOT)


def overrides(script: str, *argv: str, **variables: str) -> list[str]:
    """Of the command that a dry run prints."""
    done = dry(script, *argv, **variables)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout.splitlines()[0])
    assert words[1:3] == ["-m", "verl.trainer.main_ppo"]
    return words[3:]


def value(given: list[str], key: str) -> str:
    """The last value of an override, as Hydra takes it."""
    return [word.split("=", 1)[1] for word in given if word.lstrip("+").split("=")[0] == key][-1]
