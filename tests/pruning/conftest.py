"""Each family's checkpoint, statistics and pruned output, made once; read only."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_patch.pruning import apply, plan
from megatron_patch.pruning.wish import Wish
from tests.pruning import checkpoints


@dataclass(frozen=True)
class Pruned:
    """A checkpoint, its statistics, and what a plan made of them."""

    model: Path
    stats: Path
    plan: Path
    output: Path


@pytest.fixture(scope="session", params=checkpoints.FAMILIES)
def pruned(request, tmp_path_factory) -> Pruned:
    return make_pruned(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def v4(tmp_path_factory) -> Pruned:
    return make_pruned(tmp_path_factory.mktemp("v4"), "deepseek_v4")


def make_pruned(folder: Path, model_type: str, wish: Wish | None = None, **options) -> Pruned:
    """Build, plan and apply; half of the experts unless `wish` says otherwise."""
    model = checkpoints.make(folder / "model", model_type, **options)
    stats = checkpoints.make_statistics(model, folder / "stats.safetensors")
    return prune(folder, model, stats, wish or Wish(keep=8))


def prune(folder: Path, model: Path, stats: Path | None, wish: Wish) -> Pruned:
    """Plan and apply."""
    assert plan.run(model, wish, stats=stats, output=folder / "plan.json") == 0
    assert apply.run(model, folder / "plan.json", folder / "pruned", progress=False) == 0
    return Pruned(model, stats, folder / "plan.json", folder / "pruned")
