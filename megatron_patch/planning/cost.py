"""What a step costs beside memory: bytes that a device sends, by kind, and an estimate of the time.

All formulas are counts of what the algorithms have to move; nothing is measured. A collective over n devices is a ring:
an all-gather or reduce-scatter of S bytes sends S (n - 1) / n from each, an all-reduce twice that. Communication is taken to
hide behind nothing, so that the time is an upper estimate for the given speeds.
"""

from dataclasses import dataclass
from math import ceil

from megatron_patch.model.architecture import Architecture, DsaSettings
from megatron_patch.model.layer_pattern import DSA
from megatron_patch.planning.flops import FlopsCounter
from megatron_patch.planning.layout import GRADIENT_BYTES, Layout, Work, by_stage, layers_of, stage_of
from megatron_patch.planning.parameters import Part

KINDS = ("gradients", "parameters", "experts", "tensor", "context", "pipeline")


@dataclass(frozen=True)
class Speeds:
    """What a device reaches: TFLOP/s in matrix products of the real shapes, and GB/s to other devices. Not data sheet peaks."""

    tflops: float
    bandwidth_gb: float


@dataclass(frozen=True)
class Cost:
    """Of one step: FLOPs of the busiest device, bytes that it sends by kind, and seconds (None without speeds)."""

    flops: float
    sent: dict[str, int]
    seconds: float | None

    @property
    def sent_total(self) -> int:
        return sum(self.sent.values())


def step_cost(
    found: list[Part],
    arch: Architecture,
    pattern: tuple[str, ...],
    dsa: DsaSettings,
    layout: Layout,
    work: Work,
    micro_batches: int,
    speeds: Speeds | None = None,
) -> Cost:
    """The cost of a step of `micro_batches` per rank on the busiest pipeline stage's device."""
    first_trained = min((part.layer for part in found if part.trainable), default=len(pattern))
    held = enumerate(by_stage(found, len(pattern), layout.pp))
    each_sent = [_sent(own, arch, pattern, layout, work, micro_batches, stage, first_trained) for stage, own in held]
    sent = max(each_sent, key=lambda each: sum(each.values()))
    flops = _flops(found, arch, pattern, dsa, layout, work, micro_batches)
    if speeds is None:
        return Cost(flops, sent, None)
    bubble = 1 + (layout.pp - 1) / micro_batches
    seconds = bubble * flops / (speeds.tflops * 1e12) + sum(sent.values()) / (speeds.bandwidth_gb * 1e9)
    return Cost(flops, sent, seconds)


def _ring(size: float, devices: int) -> float:
    return size * (devices - 1) / devices


def _sent(own: list[Part], arch, pattern, layout: Layout, work: Work, micro_batches: int, stage: int, first_trained: int) -> dict[str, int]:
    """Bytes that a device of this stage sends in a step; `own` are its parts.

        gradients    all-reduce of fp32 gradients, or reduce-scatter with the distributed optimizer
        parameters   then the all-gather of the new weights
        experts      each layer: k hidden vectors a token out and back; layers that train send as much again in the backward pass
        tensor       each layer: activations gathered and scattered twice; layers that train three times more
        context      each layer: keys and values of all heads; layers that train three times
        pipeline     a hidden vector a token to the next stage; back, where an earlier stage trains
    """
    num_layers, w = len(pattern), work.width
    copies = {"tensor": layout.dp * layout.cp, "experts": layout.expert_dp, "whole": layout.dp * layout.cp}
    split = {"tensor": layout.tp, "experts": layout.ep * layout.etp, "whole": 1}
    total = dict.fromkeys(KINDS, 0.0)
    for part in own:
        if not part.trainable:
            continue
        count, devices = ceil(part.parameters / split[part.split]), copies[part.split]
        total["gradients"] += _ring(count * GRADIENT_BYTES, devices) * (1 if layout.distributed_optimizer else 2)
        if layout.distributed_optimizer:
            total["parameters"] += _ring(count * w, devices)
    tokens = micro_batches * work.tokens / layout.cp  # of this device's group that shares matrices
    hidden = tokens * arch.hidden_size * w
    for layer in layers_of(stage, num_layers, layout.pp):
        trains = arch.trains_whole or pattern[layer] == DSA
        again = trains and work.recompute
        if arch.is_moe(layer):
            routed = hidden / layout.tp * arch.experts_per_token
            total["experts"] += 2 * _ring(routed, layout.ep * layout.etp) * (1 + trains + again)
        total["tensor"] += 4 * _ring(hidden, layout.tp) * (1 + 1.5 * trains + again)
        pairs = tokens * arch.num_heads / layout.tp * (arch.qk_head_dim + arch.v_head_dim) * w
        total["context"] += _ring(pairs * layout.cp, layout.cp) * (1 + 2 * trains + again)
    if layout.pp > 1:
        below = stage_of(first_trained, num_layers, layout.pp) < stage
        total["pipeline"] += hidden / layout.tp * ((stage < layout.pp - 1) + below)
    return {kind: int(value) for kind, value in total.items()}


def _flops(found, arch, pattern, dsa, layout: Layout, work: Work, micro_batches: int) -> float:
    """Of the busiest stage's device; products that a recomputed layer does again are counted."""
    samples, length = work.micro_batch_size * micro_batches, [work.seq_length]
    shared = layout.tp * layout.cp  # devices that share a stage's work on the same tokens
    if arch.trains_whole:
        tokens = samples * work.seq_length
        active = sum(part.active for part in found if part.name not in ("embedding", "norms"))
        attention = 3 * len(pattern) * samples * FlopsCounter.attention(arch, dsa, length)
        share = ceil(len(pattern) / layout.pp) / len(pattern)  # of the layers, on the stage that has most
        return (6 * active * tokens + attention) * (4 / 3 if work.recompute else 1) * share / shared
    counted = FlopsCounter(arch, pattern, dsa)(length, dense=False)
    base_layers = sum(kind != DSA for kind in pattern)
    last = sum(kind != DSA and stage_of(i, len(pattern), layout.pp) == layout.pp - 1 for i, kind in enumerate(pattern))
    trained = counted.dsa * (4 / 3 if work.recompute else 1) + counted.head
    return samples * max(counted.frozen / base_layers * last + trained, counted.frozen / layout.pp) / shared
