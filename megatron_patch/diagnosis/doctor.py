"""`dsa-upcycle doctor`: what this machine has, what a run would use, and what is missing, with its remedy."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_patch import __version__, errors
from megatron_patch.devices import environment
from megatron_patch.devices.npu import MINDSPEED_BRANCH

SCHEMA = 1
_MIN_WIDTH = 120  # narrower, names of variables would be broken in two
_REMEDIES = {
    "python": "make the environment with Python 3.11",
    "torch": "install torch 2.7 or later",
    "megatron-core": "pip install megatron-core==0.16.1",
    "transformers": "pip install 'transformers>=5.24,<5.25'",
    "psutil": "pip install psutil",
    "torch_npu": "install the torch_npu that goes with this torch",
    "CANN": "install CANN 9 and source its set_env.sh",
    "mindspeed": f"clone MindSpeed, check out {MINDSPEED_BRANCH}, pip install -e MindSpeed",
    "scipy": "pip install scipy",
    "einops": "pip install einops",
}


def run(json_file: Path | None = None) -> int:
    """Print the tables, and write them to `json_file` if given. What is missing is an answer: the exit code is 0."""
    document = examine()
    console = Console()
    console.width = max(console.width, _MIN_WIDTH)
    _print(console, document)
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    return errors.EXIT_OK


def examine() -> dict:
    """Everything that is printed, as doctor.json has it."""
    packages, variables = environment.packages(), environment.variables()
    devices, trouble = environment.accelerators()
    kinds = {each.kind for each in devices}
    device = next((kind for kind in ("npu", "cuda") if kind in kinds), "cpu")
    missing = [
        {"what": each.name, "found": each.found, "wanted": each.wanted, "remedy": _REMEDIES[each.name]} for each in packages if each.ok is False
    ]
    for each in variables:
        if not each.ok:
            missing.append({"what": each.name, "found": each.value, "wanted": each.usual, "remedy": "give it such a value, or unset it"})
    if trouble is not None:
        what = "CUDA" if trouble.startswith("CUDA") else "NPU"
        look = "look at nvidia-smi" if what == "CUDA" else "source CANN's set_env.sh; look at npu-smi info"
        missing.append({"what": what, "found": trouble, "wanted": "a device that torch can use", "remedy": look})
    if device == "npu" and (reason := environment.try_activation()) is not None:
        missing.append({"what": "MindSpeed's activation", "found": reason, "wanted": "it loads", "remedy": "docs/ascend.md, Set-up"})
    return {
        "schema": SCHEMA,
        "versions": {"dsa-upcycling": __version__, "system": platform.platform(), "machine": platform.machine()},
        "packages": [asdict(each) for each in packages],
        "devices": [asdict(each) for each in devices],
        "variables": [asdict(each) for each in variables],
        "will_use": _will_use(device, ends=trouble is not None and "does not load" in trouble),
        "missing": missing,
    }


def _will_use(device: str, ends: bool) -> dict[str, str]:
    """What a run without --device and --dsa-backend takes here. `ends`: it ends over torch_npu, which is named under what is missing."""
    from megatron_patch.devices.npu import BACKEND
    from megatron_patch.ops.backends import choose_backend

    patches = {"cpu": "cpu_redirect and mcore_fixes", "cuda": "mcore_fixes", "npu": "MindSpeed and mcore_fixes"}
    collectives = {"cpu": "gloo", "cuda": "nccl", "npu": BACKEND}
    return {
        "device": f"{device}, by --device {device} only: without it a run ends over torch_npu" if ends else device,
        "collectives": collectives[device],
        "dsa_backend": choose_backend("auto", device).name,
        "megatron_core": f"with {patches[device]}",
    }


def _print(console: Console, document: dict) -> None:
    console.print("  ".join(f"{name} {value}" for name, value in document["versions"].items()), highlight=False)
    rows = [(p["name"], p["found"] or "-", p["wanted"], {True: "ok", False: "NO", None: "not needed here"}[p["ok"]], p["note"]) for p in document["packages"]]
    _table(console, "Packages", ("package", "found", "wanted", "", "note"), rows)
    rows = [(f"{d['kind']}:{d['index']}", d["name"], "?" if d["memory_gb"] is None else f"{d['memory_gb']:g} GB") for d in document["devices"]]
    _table(console, "Devices", ("device", "name", "memory"), rows or [("cpu", platform.processor() or platform.machine(), "-")])
    rows = [(v["name"], "not set" if v["value"] is None else v["value"], v["usual"], v["note"]) for v in document["variables"]]
    _table(console, "Variables", ("variable", "value", "usual on Ascend", "what for"), rows)
    _table(console, "A run would use", ("what", ""), list(document["will_use"].items()))
    if not document["missing"]:
        console.print("Nothing is missing.")
    for each in document["missing"]:
        console.print(f"missing: {each['what']}: found {each['found'] or 'none'}, wanted {each['wanted']}; {each['remedy']}", highlight=False, markup=False)


def _table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False)
