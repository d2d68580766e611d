"""`dsa-upcycle doctor` on any machine: it looks, says, and never fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patch.devices import environment
from megatron_patch.diagnosis import doctor
from megatron_patch.io.strict_json import read_json

ROOT = Path(__file__).parents[2]
STAND_INS = [ROOT / "tests" / "devices" / name for name in ("stand_ins", "stand_ins_mindspeed")]


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "doctor.json"
    assert doctor.run(file) == 0
    got = read_json(file)
    assert got["schema"] == 1
    by_name = {each["name"]: each for each in got["packages"]}
    assert by_name["megatron-core"] == {"name": "megatron-core", "found": "0.16.1", "wanted": "0.16.1", "ok": True, "note": ""}
    assert by_name["mindspeed"]["ok"] is None and by_name["torch_npu"]["found"] is None  # nobody needs them here
    expected = {"device": "cpu", "collectives": "gloo", "dsa_backend": "by-length", "megatron_core": "with cpu_redirect and mcore_fixes"}
    assert got["will_use"] == expected and got["missing"] == []
    assert "HCCL_CONNECT_TIMEOUT" in (out := capsys.readouterr().out) and "Nothing is missing." in out


def test_what_is_wrong_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    versions = {"torch": "2.6.0", "megatron-core": "0.17.0", "transformers": "5.24.1"}
    monkeypatch.setattr(environment, "_version", versions.get)
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "[60]")  # nothing of a value is markup
    got = doctor.examine()
    assert [each["what"] for each in got["missing"]] == ["torch", "megatron-core", "psutil", "HCCL_CONNECT_TIMEOUT"]
    doctor._print(doctor.Console(), got)
    out = capsys.readouterr().out
    assert "missing: megatron-core: found 0.17.0, wanted 0.16.1; pip install megatron-core==0.16.1" in " ".join(out.split())
    assert "[60]" in out


def test_an_ascend_machine(tmp_path: Path) -> None:
    """With the stand-ins: devices are counted, the activation is tried in another process, and what fails there is named."""
    code = """
import torch_npu, torch, types
torch.npu.get_device_properties = lambda i: types.SimpleNamespace(total_memory=64e9)
torch.npu.get_device_name = lambda i: "910"
from megatron_patch import cli
raise SystemExit(cli.dispatch(["doctor", "--json", "doctor.json"]))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*STAND_INS, ROOT])), "STAND_IN": "needs_training"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    got = read_json(tmp_path / "doctor.json")
    assert [each["memory_gb"] for each in got["devices"]] == [64.0, 64.0]
    assert got["will_use"]["dsa_backend"] == "npu" and got["will_use"]["collectives"] == "cpu:gloo,npu:hccl"
    missing = {each["what"]: each["found"] for each in got["missing"]}
    assert "CANN" in missing and "needs megatron.training" in missing["MindSpeed's activation"]


def test_a_torch_npu_that_does_not_load_is_an_answer(tmp_path: Path) -> None:
    """CANN's variables are not set: torch imports its backends with itself, and would end the process that is asked why."""
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    package = tmp_path / "torch_npu-2.13.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [tmp_path, ROOT])), "HCCL_CONNECT_TIMEOUT": "an hour", "HCCL_SOCKET_IFNAME": "nowhere0"}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True, cwd=tmp_path)

    done = run("-m", "megatron_patch", "doctor", "--json", "doctor.json")
    assert done.returncode == 0, done.stderr
    got = read_json(tmp_path / "doctor.json")
    missing = {each["what"]: each["found"] for each in got["missing"]}
    assert missing["HCCL_CONNECT_TIMEOUT"] == "an hour" and missing["HCCL_SOCKET_IFNAME"] == "nowhere0"
    assert "ImportError: libhccl.so" in missing["NPU"] and missing["CANN"] is None
    assert "by --device cpu only" in got["will_use"]["device"]
    done = run(ROOT / "pretrain_upcycle.py", "--base-model", "b")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "Failed to load the backend extension: torch_npu (ImportError: libhccl.so" in done.stderr


@pytest.mark.parametrize(
    "name, value, taken",
    [("HCCL_EXEC_TIMEOUT", "60", True), ("HCCL_EXEC_TIMEOUT", "-1", False), ("HCCL_DETERMINISTIC", "True", True),
     ("HCCL_DETERMINISTIC", "yes", False), ("TASK_QUEUE_ENABLE", "3", False), ("ASCEND_RT_VISIBLE_DEVICES", "0,1", True),
     ("ASCEND_RT_VISIBLE_DEVICES", "0;1", False), ("HCCL_SOCKET_IFNAME", "lo", True), ("HCCL_SOCKET_IFNAME", "=l", False),
     ("HCCL_SOCKET_IFNAME", "l", True), ("GLOO_SOCKET_IFNAME", "l", False), ("HCCL_SOCKET_IFNAME", "^docker", True)],
)  # fmt: skip
def test_a_value_that_its_reader_refuses_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, taken: bool) -> None:
    monkeypatch.setenv(name, value)
    assert [each.name for each in environment.variables() if not each.ok] == ([] if taken else [name])


@pytest.mark.parametrize(
    "name, text, version",
    [
        ("version.cfg", "# version: 1.0\nruntime_running_version=[9.0.0.1:9.0.0]\n", "9.0.0"),
        ("aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=9.1.0\n", "9.1.0"),
    ],
)
def test_cann_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, version: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert environment.cann_version() == version


def test_mindspeed_is_known_by_its_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mindspeed").mkdir()
    (tmp_path / "mindspeed" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert environment.mindspeed_branch() is None
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/core_r0.12.1\n")
    assert environment.mindspeed_branch() == "core_r0.12.1"
    [package] = [each for each in environment.packages() if each.name == "mindspeed"]
    assert package.ok is False
