"""What this machine has: packages, devices, variables. Only looks; what it cannot find out is said, never raised."""

import os
import platform
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from megatron_patch.devices.mcore_fixes import MCORE_VERSION
from megatron_patch.devices.npu import MINDSPEED_BRANCH
from megatron_patch.errors import UserError

ACTIVATION_SECONDS = 300.0


@dataclass(frozen=True)
class Package:
    """`found` is None where it is absent; `ok` None where it is absent and not needed here."""

    name: str
    found: str | None
    wanted: str
    ok: bool | None
    note: str = ""


@dataclass(frozen=True)
class Accelerator:
    kind: str
    index: int
    name: str
    memory_gb: float | None


@dataclass(frozen=True)
class Variable:
    """`ok` is False where the value is none that its reader takes."""

    name: str
    value: str | None
    usual: str
    note: str
    ok: bool


# What a set variable has to look like; the interfaces are looked for on this machine.
_WHOLE = r"[0-9]+"
_FORMS = {
    "HCCL_CONNECT_TIMEOUT": _WHOLE,
    "HCCL_EXEC_TIMEOUT": _WHOLE,
    "HCCL_DETERMINISTIC": r"(?i:true|false|strict)",
    "CLOSE_MATMUL_K_SHIFT": r"[01]",
    "CUDA_DEVICE_MAX_CONNECTIONS": _WHOLE,
    "TASK_QUEUE_ENABLE": r"[012]",
    "STREAMS_PER_DEVICE": _WHOLE,
    "ASCEND_RT_VISIBLE_DEVICES": r"([0-9]+(,[0-9]+)*)?",
}
# Public launch scripts' values; examples/ascend_a2 and ascend_a3 set them.
VARIABLES = (
    ("HCCL_CONNECT_TIMEOUT", "3600", "seconds that ranks wait for each other at the start: loading takes minutes"),
    ("HCCL_EXEC_TIMEOUT", "3600", "seconds that a collective waits for the slowest rank"),
    ("HCCL_SOCKET_IFNAME", "a network interface", "several machines: where HCCL's ranks meet"),
    ("GLOO_SOCKET_IFNAME", "a network interface", "several machines: where gloo's ranks meet"),
    ("HCCL_DETERMINISTIC", "True", "equal sums in every run"),
    ("CLOSE_MATMUL_K_SHIFT", "1", "equal sums in every run"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "order of communication and computation in megatron-core"),
    ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "less fragmentation"),
    ("TASK_QUEUE_ENABLE", "2", "operators are queued from another thread"),
    ("CPU_AFFINITY_CONF", "1 on A3, 2 on A2", "threads stay near their device"),
    ("STREAMS_PER_DEVICE", "32", "streams that torch_npu may open"),
    ("ASCEND_RT_VISIBLE_DEVICES", "unset", "which devices may be used"),
    ("ASCEND_HOME_PATH", "CANN's folder", "set by CANN's set_env.sh"),
    ("CUDA_VISIBLE_DEVICES", "unset", "which GPUs may be used"),
)


def packages() -> list[Package]:
    """Versions, against those that this release was written for."""
    ascend = util.find_spec("torch_npu") is not None
    torch = _version("torch")
    found = [
        Package("python", platform.python_version(), "3.11", sys.version_info[:2] == (3, 11)),
        Package("torch", torch, ">= 2.7", torch is not None and _numbers(torch) >= (2, 7)),
        _exact("megatron-core", MCORE_VERSION),
        _exact("transformers", "5.24", prefix=True),
        Package("psutil", _version("psutil"), "any", _version("psutil") is not None, "without it, saving hangs"),
    ]
    torch_npu = _version("torch_npu") or _version("torch-npu")
    fits = None if torch_npu is None else torch is not None and _numbers(torch_npu)[:2] == _numbers(torch)[:2]
    found.append(Package("torch_npu", torch_npu, "as torch", fits, "its first two numbers are torch's"))
    cann = cann_version()
    found.append(Package("CANN", cann, "9", (_numbers(cann)[:1] == (9,)) if cann else (False if ascend else None)))
    mindspeed, branch = _version("mindspeed"), mindspeed_branch()
    there = mindspeed is not None or util.find_spec("mindspeed") is not None
    ok = (branch in (None, MINDSPEED_BRANCH)) if there else (False if ascend else None)
    shown = f"{mindspeed or 'without metadata'}, branch {branch or 'unknown'}" if there else None
    found.append(Package("mindspeed", shown, f"branch {MINDSPEED_BRANCH}", ok, "from source"))
    for name in ("scipy", "einops"):
        version = _version(name)
        found.append(Package(name, version, "any", version is not None if ascend else None, "MindSpeed imports it"))
    return found


def cann_version() -> str | None:
    """CANN's version by the files that its installer leaves; None where there is none."""
    roots = [Path(p) for p in (os.environ.get("ASCEND_HOME_PATH"), os.environ.get("ASCEND_TOOLKIT_HOME")) if p]
    roots.append(Path("/usr/local/Ascend/ascend-toolkit/latest"))
    for root in roots:
        for file in (root / "version.cfg", *sorted(root.glob("*-linux/ascend_toolkit_install.info")), *sorted(root.glob("version.info"))):
            try:
                text = file.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            if match := re.search(r"(?:[Vv]ersion|running)\w*\s*=\s*\[?(?:\d+\.\d+[^:\]\s]*:)?([0-9][\w.]*)", text):
                return match[1]
    return None


def mindspeed_branch() -> str | None:
    """The git branch of MindSpeed's source; None where it is not installed from a clone."""
    spec = util.find_spec("mindspeed")
    if spec is None or not spec.submodule_search_locations:
        return None
    head = Path(next(iter(spec.submodule_search_locations))).parent / ".git" / "HEAD"
    try:
        text = head.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return text.removeprefix("ref: refs/heads/") if text.startswith("ref: ") else f"none, at {text[:12]}"


def accelerators() -> tuple[list[Accelerator], str | None]:
    """(devices that torch can use, why there are none although their software is there)."""
    import torch

    found: list[Accelerator] = []
    try:
        for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            memory = round(torch.cuda.get_device_properties(i).total_memory / 1e9, 1)
            found.append(Accelerator("cuda", i, torch.cuda.get_device_name(i), memory))
    except Exception as error:  # whatever a driver raises is the answer
        return found, f"CUDA fails: {type(error).__name__}: {error}"
    if util.find_spec("torch_npu") is None:
        return found, None
    try:
        from megatron_patch.devices import npu

        if not npu.is_available():
            return found, "torch_npu is installed, and torch.npu.is_available() is False"
        for i in range(torch.npu.device_count()):
            memory = getattr(torch.npu.get_device_properties(i), "total_memory", None)
            found.append(Accelerator("npu", i, torch.npu.get_device_name(i), memory and round(memory / 1e9, 1)))
    except UserError as error:  # it does not load
        return found, str(error)
    except Exception as error:  # whatever a half-installed driver raises is the answer
        return found, f"torch_npu fails: {type(error).__name__}: {error}"
    return found, None


def variables() -> list[Variable]:
    """The variables that decide about devices and communication."""
    given = {name: os.environ.get(name) for name, _, _ in VARIABLES}
    return [Variable(name, given[name], usual, note, _is_taken(name, given[name])) for name, usual, note in VARIABLES]


def _is_taken(name: str, value: str | None) -> bool:
    if value is None:
        return True
    if name in _FORMS:
        return re.fullmatch(_FORMS[name], value) is not None
    if not name.endswith("_SOCKET_IFNAME") or value.startswith("^"):  # ^: all but these
        return True
    exact = name.startswith("GLOO") or value.startswith("=")  # else HCCL takes the beginning of a name
    there = [each for _, each in socket.if_nameindex()]
    wanted = value.removeprefix("=").split(",")
    return any(each == one or (not exact and each.startswith(one)) for each in there for one in wanted if one)


def try_activation(seconds: float = ACTIVATION_SECONDS) -> str | None:
    """Load MindSpeed on an NPU in a process of its own, since it patches what it finds; None: it works, else the reason."""
    code = (
        "from megatron_patch import errors\n"
        "from megatron_patch.devices.device import activate\n"
        "import sys\n"
        "sys.exit(errors.run(lambda: activate('npu') and 0))"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"activation took more than {seconds:g} s"
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines[-1].removeprefix("error: ") if lines else f"exit code {done.returncode}")


def _exact(name: str, wanted: str, prefix: bool = False) -> Package:
    found = _version(name)
    return Package(name, found, wanted, found is not None and (found.startswith(wanted + ".") if prefix else found == wanted))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])
