"""kill -9 anywhere in `apply`: nothing that is left can be loaded, and the resumed output equals an uninterrupted one."""

import json
import subprocess
import sys
from pathlib import Path

from tests.pruning.conftest import make_pruned

ROOT = Path(__file__).parents[2]
POINTS = 20

# Imports once, then forks a process for each run. A run counts what it does to the file system (every open, rename,
# removal, copy, and each piece of a shard) and kills itself with SIGKILL at a given count, in a piece after half of it.
DRIVER = """
import json, os, random, signal, sys
from pathlib import Path
from megatron_patch.pruning import apply, shards
from safetensors import safe_open

model, plan, folder, points = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
count, limit, armed = 0, None, False
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "shutil.copyfile", "tempfile.mkstemp")

def step():
    global count
    count += 1
    if count == limit:
        os.kill(os.getpid(), signal.SIGKILL)

def audit(event, args):
    if armed and event in EVENTS:
        step()

real = shards._Copier.__call__
def copy(self, offset, length):
    half = length // 2
    real(self, offset, half)
    if armed:
        step()
    real(self, offset + half, length - half)
shards._Copier.__call__ = copy
os.fsync = lambda number: None  # guards against a power cut, which a kill is not; it takes most of the time
sys.addaudithook(audit)

def run(output, at, resume):
    "Fork a run; returns its wait status and, of one that ended, its count."
    global limit, armed
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        limit, armed = at, True
        code = apply.run(model, plan, output, resume=resume, progress=False)
        armed = False
        os.write(writer, str(count).encode())
        os._exit(code)
    os.close(writer)
    status = os.waitpid(pid, 0)[1]
    said = os.read(reader, 100)
    os.close(reader)
    return status, int(said or 0)

def tree(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}

whole = folder / "whole"
status, total = run(whole, None, False)
assert status == 0, status
expected = tree(whole)
rng = random.Random(0)
kills, published = sorted(rng.sample(range(1, total + 1), points)), 0
for at in kills:
    output = folder / f"at{at}"
    status, _ = run(output, at, False)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (at, status)
    if output.exists():
        assert tree(output) == expected, f"half an output was published at {at}"
        published += 1
    partial = folder / f".at{at}.partial-prune"
    if (partial / "config.json").exists():  # written last: all the rest must be there
        assert set(expected) <= set(tree(partial)), at
    second = rng.randrange(1, total)  # killed once more while resuming, where it comes so far
    run(output, second, True)
    status, _ = run(output, None, True)
    assert status == 0, (at, status)
    assert tree(output) == expected, f"resumed at {at} and {second}, the output differs"
left = [p.name for p in folder.iterdir() if p.name.startswith(".")]
assert not left, left
print(json.dumps({"total": total, "kills": kills, "published": published}))
"""


def test_resumed_output_equals_an_uninterrupted_one(tmp_path):
    made = make_pruned(tmp_path / "made", "deepseek_v4", quantise="fp4", shards=4)
    runs = tmp_path / "runs"
    runs.mkdir()
    command = [sys.executable, "-c", DRIVER, made.model, made.plan, runs, POINTS]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said["kills"]) == POINTS and said["total"] > 3 * POINTS
