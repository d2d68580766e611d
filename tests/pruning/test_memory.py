"""Memory of `apply` does not grow with the checkpoint, nor with a tensor: it is a few buffers beside the imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import prune_apply
from megatron_patch.pruning.shards import CHUNK_BYTES

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    """600 MB with experts of 2.3 MB; the single-process peak is what the kernel reports of a fresh process."""
    model, plan = prune_apply.build(tmp_path, 600_000_000), tmp_path / "plan.json"
    prune_apply.make_plan(model, plan)
    size = sum(item.stat().st_size for item in model.iterdir())
    assert size > 500_000_000
    code = (
        "import resource, sys; from megatron_patch.pruning import apply; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        f"apply.run({str(model)!r}, {str(plan)!r}, {str(tmp_path / 'out')!r}, progress=False); "
        "print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    before, after = (int(kilobytes) * 1024 for kilobytes in done.stdout.splitlines()[-1].split())
    assert after < 1_000_000_000
    assert after - before < 8 * CHUNK_BYTES, f"{(after - before) / 1e6:.0f} MB beside the imports"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_routed_experts"] == prune_apply.EXPERTS // 2
