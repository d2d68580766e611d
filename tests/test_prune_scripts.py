"""examples/prune: the chain that prune.sh builds, and both recorders against stand-ins of their engines."""

import base64
import json
import os
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from megatron_patch import cli_prune, flags
from megatron_patch.pruning.statistics import Statistics

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "examples" / "prune"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with dsa-upcycle and python, of this environment and this source."""
    folder = tmp_path / "bin"
    folder.mkdir()
    lines = {"dsa-upcycle": f'exec "{sys.executable}" -m megatron_patch "$@"', "python": f'exec "{sys.executable}" "$@"'}
    for name, line in lines.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


def bash(script: str, *argv: str, tools: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{tools}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(["bash", str(SCRIPTS / script), *argv], env=env, capture_output=True, text=True, cwd=ROOT)


def recording(tokens: int) -> np.ndarray:
    """int32 [tokens, 3, 2] as of the tiny base, whose first layer is dense."""
    ids = np.tile(np.array([[0, 0], [1, 2], [3, 0]], dtype=np.int32), (tokens, 1, 1))
    return ids


def write_chats(path: Path, number: int) -> Path:
    chats = [{"messages": [{"role": "user", "content": f"q{i}"}]} for i in range(number)]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return path


def test_prune_builds_the_whole_chain(tools: Path) -> None:
    given = {"MODEL": "m", "DATA": "a.jsonl b.jsonl", "KEEP": "4", "SUITE": "s", "CHAT": "1", "DEVICE": "cpu", "OUTPUT": "o/p"}
    done = bash("prune.sh", "--groups", "flatten", tools=tools, DRY_RUN="1", **given)
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line)[1:] for line in done.stdout.splitlines()]
    names = [command[1] if command[0] == "prune" else command[0] for command in commands]
    assert names == ["plan", "observe", "plan", "apply", "verify", "report", "evaluate"]
    assert "--check-only" in commands[0] and "--groups" in commands[0] and "--groups" in commands[2]
    observe = flags.parse(cli_prune.Observe, commands[1][2:], "prune observe")
    assert observe.data == (Path("a.jsonl"), Path("b.jsonl")) and observe.chat and observe.resume and observe.device == "cpu"
    report = flags.parse(cli_prune.Report, commands[5][2:], "prune report")
    assert report.stats == observe.output == Path("o/p/statistics.safetensors") and report.plan == Path("o/p/plan.json")
    assert commands[6][:3] == ["evaluate", "--kind", "prune"]


def test_prune_takes_statistics_that_are_there(tools: Path) -> None:
    done = bash("prune.sh", tools=tools, DRY_RUN="1", MODEL="m", KEEP="4", STATS="s.safetensors")
    assert " observe " not in done.stdout and "evaluate" not in done.stdout
    assert done.stdout.count("--stats s.safetensors") == 2


@pytest.mark.parametrize(
    ("script", "given", "missing"),
    [
        ("prune.sh", {"MODEL": "m"}, "KEEP"),
        ("prune.sh", {"MODEL": "m", "KEEP": "4"}, "DATA"),
        ("observe_vllm.sh", {"DATA": "d"}, "MODEL"),
        ("observe_sglang.sh", {"MODEL": "m"}, "DATA"),
    ],
)
def test_a_missing_input_is_named(script: str, given: dict[str, str], missing: str, tools: Path) -> None:
    done = bash(script, tools=tools, DRY_RUN="1", **given)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {missing} is not set"), done.stderr


class _Sglang(BaseHTTPRequestHandler):
    """Answers /generate as SGLang does: base64 of int32 for all tokens but the last."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["return_routed_experts"] is True
        prompt, made = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        ids = base64.b64encode(recording(prompt + made - 1).tobytes()).decode()
        info = {"routed_experts": ids, "prompt_tokens": prompt, "completion_tokens": made, "id": "x"}
        answer = json.dumps({"text": "y", "meta_info": info}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_) -> None:
        pass


def test_observe_sglang_against_a_stand_in(tiny_base: Path, tools: Path, tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sglang)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        given = {"MODEL": str(tiny_base), "DATA": str(write_chats(tmp_path / "chats.jsonl", 3)), "GENERATE": "4"}
        given |= {"URL": f"http://127.0.0.1:{server.server_port}", "OUTPUT": str(tmp_path / "s.safetensors")}
        done = bash("observe_sglang.sh", tools=tools, **given)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    got = Statistics.load(tmp_path / "s.safetensors").sources["chats"]
    prompt = len("User: q0\n\nAssistant:") + 1
    assert got.tokens == 3 * (prompt + 3)
    assert got.count[0].tolist() == [0, got.tokens, got.tokens, 0, 0, 0, 0, 0]


def test_a_server_that_is_not_there_is_one_line(tiny_base: Path, tools: Path, tmp_path: Path) -> None:
    given = {"MODEL": str(tiny_base), "DATA": str(write_chats(tmp_path / "chats.jsonl", 1)), "URL": "http://127.0.0.1:9"}
    done = bash("observe_sglang.sh", tools=tools, OUTPUT=str(tmp_path / "s.safetensors"), **given)
    assert done.returncode != 0 and "error: an SGLang server must answer at http://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


FAKE_VLLM = """
import numpy as np
from types import SimpleNamespace


class SamplingParams:
    def __init__(self, max_tokens, temperature):
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, model, tensor_parallel_size, max_model_len, enable_return_routed_experts):
        assert enable_return_routed_experts

    def chat(self, conversations, sampling):
        ids = np.tile(np.array([[0, 0], [1, 2], [3, 0]], dtype=np.int16), (sampling.max_tokens, 1, 1))
        return [SimpleNamespace(outputs=[SimpleNamespace(routed_experts=ids)]) for _ in conversations]
"""


def test_observe_vllm_against_a_stand_in(tiny_base: Path, tools: Path, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    given = {"MODEL": str(tiny_base), "DATA": str(write_chats(tmp_path / "chats.jsonl", 3)), "GENERATE": "6"}
    given |= {"OUTPUT": str(tmp_path / "out" / "s.safetensors"), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = bash("observe_vllm.sh", "--at-once", "2", tools=tools, **given)
    assert done.returncode == 0, done.stderr
    got = Statistics.load(tmp_path / "out" / "s.safetensors")
    assert got.sources["chats"].tokens == 18 and not got.sources["chats"].has_gates
