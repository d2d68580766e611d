"""Fresh interpreters for little: one process imports what is slow and proves nothing, and each case is a fork of it.

Activation has to come before the first import of megatron-core, so that its tests need a process each; two thirds of its time
went into torch, sympy and wandb. What a case is about is in none of them: `CASE_IMPORTS` are checked to be absent.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASE_IMPORTS = ("megatron", "megatron_patch", "torch_npu", "mindspeed")
SLOW = ("torch.distributed.tensor", "torch.distributed.checkpoint", "torch._inductor.compile_fx", "torch.utils.tensorboard", "wandb", "sympy")


class Forks:
    """Runs code in forks of one process; close it.

    `run` takes the code, its sys.argv, what stands before site-packages on sys.path, and variables of its environment.
    """

    def __init__(self) -> None:
        own = {"RANK", "LOCAL_RANK", "PYTHONPATH"}
        env = {key: value for key, value in os.environ.items() if key not in own}
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.devices.forked import serve; serve()"]
        self._server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def run(self, code: str, argv: Sequence[str], path: Sequence[Path], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
        case = {"code": code, "argv": list(argv), "path": [str(each) for each in (*path, ROOT)], "variables": variables}
        print(json.dumps(case), file=self._server.stdin, flush=True)
        return subprocess.CompletedProcess([], *json.loads(self._server.stdout.readline()))

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait(timeout=60)
        self._server.stdout.close()


def serve() -> None:
    """The other side: a case a line on standard input, [exit code, stdout, stderr] a line on standard output."""
    import importlib
    import tempfile

    for name in SLOW:
        importlib.import_module(name)
    there = [name for name in sys.modules if name.partition(".")[0] in CASE_IMPORTS]
    assert not there, there
    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if child == 0:
                _case(json.loads(line), out.fileno(), err.fileno())
            _, status = os.waitpid(child, 0)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        print(json.dumps([os.waitstatus_to_exitcode(status), *texts]), flush=True)
    os._exit(0)  # taking those modules down takes seconds


def _case(case: dict, out: int, err: int) -> None:
    """Never returns: a fork ends here, without the server's clean-up."""
    import signal
    import traceback

    signal.alarm(300)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ.update(case["variables"])
    sys.argv[:] = ["-c", *case["argv"]]
    sys.path[:] = [*case["path"], *(each for each in sys.path if each not in ("", str(ROOT)))]
    code = 0
    try:
        exec(compile(case["code"], "<case>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
