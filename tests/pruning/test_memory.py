"""Memory of `apply` does not grow with the checkpoint, nor with a tensor: it is a few buffers beside the imports."""

import json

import pytest

from benchmarks import prune_apply
from megatron_patch.pruning.shards import CHUNK_BYTES


@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    """600 MB with experts of 2.3 MB; the peak is what the kernel reports of a fresh process."""
    model, plan = prune_apply.build(tmp_path, 600_000_000), tmp_path / "plan.json"
    prune_apply.make_plan(model, plan)
    size = sum(item.stat().st_size for item in model.iterdir())
    assert size > 500_000_000
    _, _, before = prune_apply.python("from megatron_patch.pruning import apply")
    run = f"apply.run({str(model)!r}, {str(plan)!r}, {str(tmp_path / 'out')!r}, progress=False)"
    _, _, after = prune_apply.python(f"from megatron_patch.pruning import apply; {run}")
    assert after < 1_000_000_000
    assert after - before < 8 * CHUNK_BYTES, f"{(after - before) / 1e6:.0f} MB beside the imports"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_routed_experts"] == prune_apply.EXPERTS // 2
