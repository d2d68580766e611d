"""A layout that fits: all sizes of the groups are tried, those that do not fit are dropped, the cheapest is named."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_patch.errors import UserError
from megatron_patch.layout_rules import Launch, check_layout
from megatron_patch.model.architecture import Architecture, DsaSettings
from megatron_patch.planning.cost import Cost, Speeds, step_cost
from megatron_patch.planning.layout import Bytes, Layout, PlanParallel, Work, bytes_per_device, make_layout
from megatron_patch.planning.parameters import Part

ROOM = 0.9  # of a device's memory; the rest is for communication buffers and fragmentation, which are not counted
# For the order of layouts where no speeds are given: only their ratio matters (about 4,000 FLOPs a byte).
NOMINAL = Speeds(tflops=100, bandwidth_gb=25)
MAX_TENSOR = 8  # beyond, it leaves the node


@dataclass(frozen=True)
class Recommendation:
    """A layout with what it needs.

    Attributes:
        recompute: whether layers that train keep their inputs only.
        trains: whether the training programs take it. They train no whole model: true there.
    """

    layout: Layout
    recompute: bool
    trains: bool
    used: Bytes
    cost: Cost
    micro_batches: int


def recommend(
    found: list[Part],
    arch: Architecture,
    pattern: tuple[str, ...],
    dsa: DsaSettings,
    *,
    devices: int,
    memory_bytes: float,
    work: Work,
    global_batch_size: int,
    speeds: Speeds | None = None,
) -> Recommendation | None:
    """The layout with the least estimated step time among those that fill at most 90% of a device; None: none does.

    For a base to upcycle, one that the training programs refuse is named only where none that they take fits.

    Args:
        global_batch_size: samples of a step; the data-parallel ranks must divide it.
        speeds: without them the order is that of `NOMINAL`, and no time is given.
    """
    best: tuple[tuple, Recommendation] | None = None
    for layout in layouts(arch, len(pattern), devices):
        if global_batch_size % (layout.dp * work.micro_batch_size):
            continue
        micro_batches = global_batch_size // (layout.dp * work.micro_batch_size)
        trains = arch.trains_whole or _taken(layout, devices, arch)
        for recompute in (False, True):
            each = replace(work, recompute=recompute)
            used = bytes_per_device(found, arch, pattern, dsa, layout, each)
            if used.total > ROOM * memory_bytes:
                continue
            cost = step_cost(found, arch, pattern, dsa, layout, each, micro_batches, speeds or NOMINAL)
            # Of equal times, the layout that shares least: it is the easiest to run.
            key = (not trains, cost.seconds, layout.pp, layout.tp, layout.cp, layout.ep)
            if best is None or key < best[0]:
                shown = cost if speeds else replace(cost, seconds=None)
                best = key, Recommendation(layout, recompute, trains, used, shown, micro_batches)
            break  # recomputation costs time: not where the layout fits without
    return best and best[1]


def batch_divides(arch: Architecture, num_layers: int, *, devices: int, work: Work, global_batch_size: int) -> bool:
    """Whether any layout's data-parallel ranks divide the batch: else nothing is recommended, however large a device is."""
    return any(global_batch_size % (layout.dp * work.micro_batch_size) == 0 for layout in layouts(arch, num_layers, devices))


def _taken(layout: Layout, devices: int, arch: Architecture) -> bool:
    groups = Launch(layout.tp, layout.pp, layout.ep, layout.etp, layout.cp, sequence=layout.tp > 1)
    try:
        check_layout(replace(groups, distributed_optimizer=True, ranks=devices, experts=arch.num_experts))
    except UserError:
        return False
    return True


def layouts(arch: Architecture, num_layers: int, devices: int) -> Iterator[Layout]:
    """Every layout of powers of two that the rules allow, with the distributed optimizer. Context stays whole."""
    for tp in _powers(min(MAX_TENSOR, arch.num_heads, devices)):
        for pp in _powers(min(num_layers, devices)):
            for ep in _powers(min(arch.num_experts, devices)):
                parallel = PlanParallel(
                    tensor_model_parallel_size=tp,
                    pipeline_model_parallel_size=pp,
                    expert_model_parallel_size=ep,
                    expert_tensor_parallel_size=1 if ep > 1 else tp,
                    sequence_parallel=tp > 1,
                    use_distributed_optimizer=True,
                )
                try:
                    yield make_layout(parallel, devices, arch, num_layers)
                except UserError:  # these sizes do not divide the devices, the heads or the experts
                    continue


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]
