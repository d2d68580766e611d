"""Imports point one way. Read from the source, so that an import inside a function counts too."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_patch"

# Each room, and the rooms that it may import from. Modules at the package's top are rooms of their own.
FOUNDATION = {"errors", "claims", "config", "faults", "io", "layout_rules", "ops", "statistics"}
MIDDLE = FOUNDATION | {"devices", "model"}
UPPER = MIDDLE | {"checkpoint", "data", "planning"}
TRAINING = UPPER | {"training"}
REPORTS = TRAINING | {"evaluation", "diagnosis"}
ALLOWED = {
    "errors": set(),
    "claims": {"errors"},
    "config": {"errors", "layout_rules"},
    "layout_rules": {"errors"},
    "faults": set(),
    "flags": {"errors"},
    "io": {"errors"},
    "ops": set(),
    "statistics": set(),
    "hf_model": set(),
    "devices": MIDDLE,
    "model": MIDDLE,
    "checkpoint": UPPER | {"hf_model"},  # the export carries its files
    "data": UPPER,
    "planning": {"errors", "config", "layout_rules", "model"},
    "pruning": {"errors", "claims", "io", "hf_model"},  # an upcycled export runs with its class, not with the directory's code
    "demo": {"errors", "io", "data"},
    "training": TRAINING,
    "evaluation": REPORTS | {"hf_model", "pruning"},  # its families, and a plan's masks
    "diagnosis": REPORTS | {"hf_model"},
    "verl": {"errors", "hf_model"},
    "cli": REPORTS | {"flags", "demo", "pruning", "hf_model", "cli_machine", "cli_parity", "cli_prune"},
    "cli_machine": {"model", "planning", "diagnosis"},
    "cli_parity": {"errors", "flags", "diagnosis"},
    "cli_prune": {"errors", "flags", "pruning"},
    "__main__": {"cli"},
}
STANDARD = set(sys.stdlib_module_names)
# What a room may import from outside, where that is restricted.
OUTSIDE = {
    "ops": {"torch", "torch_npu", "numba"},  # the latter two each in one function: on Ascend, and where it is installed
    "io": {"torch", "safetensors", "tqdm"},
    "planning": {"rich"},
    "flags": {"tyro"},
    "cli": {"tyro"},
    "errors": set(),
    "claims": {"rich"},
    "config": set(),
    "cli_parity": {"tyro"},
    "cli_prune": {"tyro"},
    "hf_model": {"torch", "transformers"},
    # verl's environment has these, and none of the package's other requirements.
    "verl": {"transformers", "hydra", "omegaconf", "verl"},
    # matplotlib draws the report, pyarrow and numpy read what engines recorded, accelerate is optional (--device auto).
    "pruning": {"torch", "safetensors", "transformers", "tqdm", "rich", "numpy", "matplotlib", "pyarrow", "accelerate"},
}
NO_MEGATRON = ("io", "ops", "hf_model", "planning", "pruning", "demo", "verl")


def room_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else file.stem


def imported(file: Path) -> set[str]:
    """Full names of everything that a file imports, at its top or in a function; type-only imports count as well."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # "from ." stays inside the folder: hf_model's files are loaded as loose modules by transformers.
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if node.level == 0 else set()
    return found


def rooms(names: set[str]) -> set[str]:
    """The rooms of this package among imported names."""
    inside = {name.split(".")[1] for name in names if name.startswith("megatron_patch.")}
    return inside - {"__version__"}


FILES = sorted(file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_file_imports_only_rooms_below_it(file: Path) -> None:
    room = room_of(file)
    assert room in ALLOWED, f"{room} is a new room: say here what it may import"
    names = imported(file)
    wrong = rooms(names) - ALLOWED[room] - {room}
    assert not wrong, f"{file.name} of {room} imports {sorted(wrong)}"
    assert not any(name.split(".")[0] in ("tests", "pretrain_upcycle", "sft_upcycle") for name in names)


@pytest.mark.parametrize("room", sorted(OUTSIDE))
def test_what_a_room_takes_from_outside(room: str) -> None:
    for file in (each for each in FILES if room_of(each) == room):
        tops = {name.split(".")[0] for name in imported(file)} - STANDARD - {"megatron_patch"}
        assert tops <= OUTSIDE[room], f"{file.relative_to(PACKAGE)} imports {sorted(tops - OUTSIDE[room])}"


@pytest.mark.parametrize("room", NO_MEGATRON)
def test_rooms_without_megatron(room: str) -> None:
    """They must work where megatron-core is absent, for example beside a rollout engine."""
    for file in (each for each in FILES if room_of(each) == room):
        assert not any(name.split(".")[0] == "megatron" for name in imported(file)), file


def test_the_check_sees_an_import_inside_a_function(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from megatron_patch.training.loop import train\n    import megatron.core\n")
    assert imported(file) == {"megatron_patch.training.loop.train", "megatron.core"}
    assert rooms(imported(file)) == {"training"}


@pytest.mark.parametrize("init", sorted(PACKAGE.rglob("__init__.py")), ids=lambda file: file.parent.name)
def test_package_files_are_light(init: Path) -> None:
    """A room's __init__ says what it holds, and imports nothing: `import megatron_patch.io` must not bring torch."""
    tree = ast.parse(init.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{init} does not say what the room holds"
    assert imported(init) == set()


@pytest.mark.parametrize(
    "module", ["cli", "cli_prune", "flags", "config", "planning.report", "model.architecture", "diagnosis.rl_report"]
)
def test_light_modules_load_without_torch(module: str) -> None:
    """`dsa-upcycle --help`, mistakes, `plan` and `rl-report` answer at once."""
    code = f"import sys, megatron_patch.{module}; print([m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
