"""A training step with a frozen base against the same model with everything trainable, and where the step's time goes.

    python benchmarks/train_step.py --json runs/train_step.json
    python benchmarks/train_step.py --real-width                 # V2-Lite's widths, bf16: one step of ours, no other side

What a frozen base should save follows from what each side must compute, at rates that are measured in the same run:

    bound = FLOPs of the step / rate of a 1,024-wide matrix product + 28 bytes of AdamW x trainable parameters / memory rate

FLOPs are those of `planning.flops` (matrix products; the other side's layers are all counted three times). "Time over the
bound" is (ours / theirs) / (bound of ours / bound of theirs): 1 means that freezing saves all that it can. Memory is the rise of
the peak above the weights: gradients, optimizer and activations.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import random_model
import sides
import torch
import tyro

GOAL_OVER_BOUND, GOAL_MEMORY = 1.1, 3.0
ADAM_BYTES = 28  # fp32 weight, gradient and two moments read; weight and moments written
RATE_SIZE, RATE_CALLS, STREAM = 1024, 8, 1 << 26
DSA = {"index_topk": 256, "index_n_heads": 16, "index_head_dim": 64}
REAL_DSA = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}


@dataclass
class Arguments:
    tokens: int = 1024
    dsa_layers: int = 2
    backend: str = "auto"
    """Of the DSA op, as --dsa-backend."""
    repeats: int = 4
    real_width: bool = False
    """One step at V2-Lite's widths instead: one base layer with 64 experts, one DSA layer, top-k 2,048, 4,096 tokens, bf16."""
    json: Path | None = None
    """Also write the figures here."""


def prepare(side: str, tokens: int, dsa_layers: int, backend: str) -> Callable[[], object]:
    torch.set_num_threads(1)
    if side == "product":
        a, b = torch.rand(2, RATE_SIZE, RATE_SIZE)
        return lambda: [a @ b for _ in range(RATE_CALLS)]
    if side == "stream":
        x = torch.ones(STREAM)
        return lambda: x.mul_(1.0)
    step, batches = make_step(random_model.SMALL, tokens, dsa_layers, DSA, backend=backend, train_all=side == "whole")
    return lambda: step()(batches, "sparse")


def make_step(sizes: dict, tokens: int, dsa_layers: int, dsa: dict, **how):
    """(a function that returns the step, its micro-batches). Optimizer and gradients are made at the first call: they count."""
    arch, pattern, settings, model, state, device = random_model.build(sizes, dsa_layers, dsa, **how)
    from megatron_patch.planning.flops import FlopsCounter
    from megatron_patch.training.step import TrainStep

    state.recall = False  # as in all steps but those that are logged
    made: list[TrainStep] = []

    def step() -> TrainStep:
        if not made:
            bf16 = how.get("dtype") == torch.bfloat16
            ddp, optimizer = random_model.with_optimizer(model, bf16=bf16)
            made.append(TrainStep(ddp, optimizer, state, device, 1.0, FlopsCounter(arch, pattern, settings)))
        return made[0]

    return step, [random_model.documents(arch.vocab_size, [tokens])]


def bounds(arguments: Arguments) -> tuple[dict[str, float], str]:
    """(seconds that each side needs at least, how that was found)."""
    case = {"tokens": arguments.tokens, "dsa_layers": arguments.dsa_layers, "backend": arguments.backend}
    product = RATE_CALLS * 2 * RATE_SIZE**3 / sides.measure(__file__, "product", case, 5).best
    stream = 8 * STREAM / sides.measure(__file__, "stream", case, 5).best
    from megatron_patch.model.architecture import DsaSettings
    from megatron_patch.model.layer_pattern import appended_pattern
    from megatron_patch.planning.flops import FlopsCounter
    from megatron_patch.planning.parameters import count, parts

    arch = random_model.architecture(random_model.SMALL)
    pattern, dsa = appended_pattern(arch.num_layers, arguments.dsa_layers), DsaSettings(**DSA)
    flops = FlopsCounter(arch, pattern, dsa)([arguments.tokens], dense=False)
    total = count(parts(arch, pattern, dsa))[1]
    needed = {
        "frozen": (flops.total, total.trainable),
        "whole": (3 * flops.frozen + flops.dsa + flops.head * 3 // 2, total.total),
    }
    seconds = {side: f / product + ADAM_BYTES * p / stream for side, (f, p) in needed.items()}
    lines = [f"  {s}: {f / 1e9:.0f} GFLOP, {p / 1e6:.0f}M parameters train: {seconds[s]:.2f} s" for s, (f, p) in needed.items()]
    return seconds, "\n".join([f"bounds at {product / 1e9:.0f} GFLOP/s and {stream / 1e9:.1f} GB/s", *lines])


def real_width() -> None:
    """Run two steps at V2-Lite's widths and print where the second one's time goes."""
    sizes = random_model.V2_LITE | {"num_hidden_layers": 2}  # the lowest is dense, as V2-Lite's; the other has the experts
    made, batches = make_step(sizes, 4096, 1, REAL_DSA, dtype=torch.bfloat16)
    from megatron_patch.training.profile import StepClock, breakdown  # only once a device is active

    weights = sides.peak_mb()
    step = made()
    step(batches, "sparse")
    clock = StepClock(step.device)
    with ExitStack() as until:
        clock.follow(step, ("mla", "mla", "dsa"), until)
        clock.switch("other")
        started = time.perf_counter()
        step(batches, "sparse")
        clock.switch(None)
    print(f"V2-Lite's widths, 2 + 1 layers, 4,096 tokens, bf16: {time.perf_counter() - started:.1f} s a step")
    print(breakdown(clock.seconds))
    print(f"peak {sides.peak_mb():,.0f} MiB, {weights:,.0f} of them before the optimizer was made")


def main(arguments: Arguments) -> None:
    if arguments.real_width:
        return real_width()
    case = {"tokens": arguments.tokens, "dsa_layers": arguments.dsa_layers, "backend": arguments.backend}
    least, how = bounds(arguments)
    ours, theirs = (sides.measure(__file__, side, case, arguments.repeats) for side in ("frozen", "whole"))
    name = f"train_step/{{}}/tokens={arguments.tokens}/backend={arguments.backend}"
    ideal = theirs.best * least["frozen"] / least["whole"]  # what ours would take if freezing saved all that it can
    rows = [
        sides.entry(name.format("time"), "s", ours.best, theirs.best, goal=None, repeats=arguments.repeats, spread=sides.spread(ours)),
        sides.entry(name.format("time_of_saving_all"), "s", ours.best, ideal, goal=1 / GOAL_OVER_BOUND, repeats=arguments.repeats, spread=None),
        sides.entry(name.format("memory"), "MiB", ours.memory, theirs.memory, goal=GOAL_MEMORY, repeats=1, spread=None),
    ]
    print(how)
    print(f"time over the bound: {ours.best / ideal:.2f}; each alone: {ours.best / least['frozen']:.2f}, {theirs.best / least['whole']:.2f}")
    sides.publish(rows, arguments.json)


if __name__ == "__main__":
    sides.serve(prepare)
    main(tyro.cli(Arguments, description=__doc__))
