"""The loss over a large vocabulary, forward and backward: chunks of tokens against whole logits.

    python benchmarks/head_loss.py --json runs/head_loss.json

`theirs` is what megatron-core does without its fused kernels, and what this project did before: the head's matrix product,
fp32 logits, cross entropy, autograd. Both get the gradient of the hidden states alone, since the head is frozen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sides
import torch
import tyro

GOAL_MEMORY, GOAL_TIME = 8.0, 1.0


@dataclass
class Arguments:
    tokens: int = 2048
    vocabulary: int = 102400
    hidden: int = 512
    repeats: int = 3
    json: Path | None = None
    """Also write the figures here."""


def prepare(side: str, tokens: int, vocabulary: int, hidden: int) -> Callable[[], None]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=generator) * hidden**-0.5
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    if side == "chunked":
        from megatron_patch.devices import cpu_redirect

        cpu_redirect.install()
        from megatron_patch.model.head_loss import head_loss

        def work() -> None:
            head_loss(x, weight, labels).mean().backward()
    else:

        def work() -> None:
            torch.nn.functional.cross_entropy((x @ weight.T).float(), labels, reduction="none").mean().backward()

    return work


def main(arguments: Arguments) -> None:
    case = {"tokens": arguments.tokens, "vocabulary": arguments.vocabulary, "hidden": arguments.hidden}
    ours, theirs = (sides.measure(__file__, side, case, arguments.repeats) for side in ("chunked", "whole"))
    name = f"head_loss/{{}}/tokens={arguments.tokens}/vocabulary={arguments.vocabulary}"
    rows = [
        sides.entry(name.format("time"), "s", ours.best, theirs.best, goal=GOAL_TIME, repeats=arguments.repeats, spread=sides.spread(ours)),
        sides.entry(name.format("memory"), "MiB", ours.memory, theirs.memory, goal=GOAL_MEMORY, repeats=1, spread=None),
    ]
    sides.publish(rows, arguments.json)


if __name__ == "__main__":
    sides.serve(prepare)
    main(tyro.cli(Arguments, description=__doc__))
