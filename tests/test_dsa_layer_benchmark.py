"""The benchmark of the DSA layer compares like with like: megatron-core's own class computes what this project's op does."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPARE = """
import sys, json
sys.path.insert(0, "benchmarks")
import dsa_layer, torch
found = {}
for side in ("mcore", "ours"):
    sizes = dsa_layer.Sizes(96, 16, heads=3, dim=24, value_dim=16, index_heads=16, index_dim=8)  # enough heads that no scores tie
    inputs, d_out = dsa_layer.make_inputs(sizes)
    outputs = getattr(dsa_layer, side)(inputs, sizes)()
    torch.autograd.backward(outputs, [d_out, torch.tensor(1 / sizes.tokens)][: len(outputs)])
    found[side] = [outputs[0].detach(), *(x.grad for x in inputs)]
for a, b in zip(*found.values(), strict=True):
    assert b.abs().max() > 0
    # fp32 sums in another order; mcore adds 1e-10 inside its logarithms.
    torch.testing.assert_close(a, b, rtol=0, atol=2e-5 * b.abs().max().item())
print("equal")
"""


def test_both_sides_compute_the_same_output_and_gradients():
    """In a process of its own: the class is patched, as facts about it say, to run on a CPU at all."""
    done = subprocess.run([sys.executable, "-c", COMPARE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip().endswith("equal"), done.stderr[-2000:]


def test_the_quick_form_runs_and_writes_its_rows(tmp_path):
    """What docs quote comes from this script; its full form takes minutes."""
    file = tmp_path / "rows.json"
    command = [sys.executable, "benchmarks/dsa_layer.py", "--quick", "--parts", "sdpa", "--repeats", "1", "--json", str(file)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads(file.read_text())
    assert row["name"] == "dsa_layer/time_against_sdpa/tokens=512/topk=32" and row["ratio"] == row["theirs"] / row["ours"] > 0
