"""docs/ascend.md and the Dockerfiles: what they tell people to type exists, and versions are those of the code."""

import re
import shlex

from megatron_patch.cli import COMMANDS
from megatron_patch.cli_parity import COMMANDS as PARITY
from megatron_patch.config import TrainSettings
from megatron_patch.devices.mcore_fixes import MCORE_VERSION
from megatron_patch.devices.npu import MINDSPEED_BRANCH
from megatron_patch.flags import parse
from tests.test_scripts import ROOT

PAGE = (ROOT / "docs" / "ascend.md").read_text(encoding="utf-8")
TEXT = ["--text", "t", "--seq-length", "256"]


def commands() -> list[list[str]]:
    """The shell commands of the page, continuation lines joined, comments and loops' words left out."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.S)).replace("\\\n", " ")
    lines = [line.strip() for line in blocks.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line and not line.startswith(("for ", "done", "text="))]


def test_every_command_of_ours_parses() -> None:
    seen = []
    for words in commands():
        words = [each for word in words for each in (TEXT if word == "$text" else [word.replace("$device", "npu")])]
        if words[0] == "dsa-upcycle":
            table, name, rest = (PARITY, words[2], words[3:]) if words[1] == "parity" else (COMMANDS, words[1], words[2:])
            parse(table[name], rest, name)
            seen.append(name)
        elif "pretrain_upcycle.py" in words:
            parse(TrainSettings, words[2:], "pretrain_upcycle.py")
            seen.append("pretrain")
    assert {"doctor", "demo-base", "pretrain", "export", "dump", "diff"} <= set(seen)


def test_every_script_and_page_that_is_named_is_there() -> None:
    for path in re.findall(r"\b(?:examples|docker|tests|megatron_patch|data)/[\w/]+\.(?:sh|py|Dockerfile)", PAGE):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([\w.]+\.md)\)", PAGE):
        assert (ROOT / "docs" / path).exists(), path


def test_variables_of_the_checks_are_the_scripts_own() -> None:
    sources = [ROOT / "examples" / name for name in ("ascend.sh", "ascend_a2/env.sh", "ascend_a2/data.sh")]
    sources += (ROOT / "examples" / "deepseek_v2_lite").glob("*.sh")
    known = set(re.findall(r"\b([A-Z][A-Z0-9_]+)=\"\$\{", "\n".join(each.read_text() for each in sources)))
    known |= {"BASE_MODEL", "DATA_PATH", "SUITE", "HCCL_SOCKET_IFNAME"}
    for words in commands():
        if any("examples/ascend" in word for word in words):
            given = {word.partition("=")[0] for word in words if re.match(r"[A-Z][A-Z0-9_]*=", word)}
            assert given <= known, given - known


def test_versions_are_the_codes() -> None:
    assert MCORE_VERSION in PAGE and MINDSPEED_BRANCH in PAGE
    image = (ROOT / "docker" / "ascend.Dockerfile").read_text()
    assert f"ARG MINDSPEED_BRANCH={MINDSPEED_BRANCH}\n" in image
    assert "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\n" in image  # no default: it has to fit the machine
    assert "FROM python:3.11-" in (ROOT / "docker" / "cpu.Dockerfile").read_text()
