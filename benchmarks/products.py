"""One fp32 matrix product on one thread: `megatron_patch.ops.products.product` against PyTorch's own `mm`.

    OMP_NUM_THREADS=1 python benchmarks/products.py --json runs/products.json

Shapes are those of the DSA op at V2-Lite's sizes: index scores of 16 queries, one head's logits of 128 queries, and what the
backward pass multiplies. Where PyTorch's mm is as fast, the ratio is 1; results are compared, too. Processor seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sides
import torch
import tyro

SHAPES = ((512, 128, 1024), (512, 1024, 128), (128, 192, 4096), (128, 4096, 128), (1024, 1024, 1024))  # M, K, N
OPERATIONS = 4e9  # of one repeat


@dataclass
class Arguments:
    repeats: int = 10
    json: Path | None = None
    """Also write the figures here."""


def prepare(side: str, shape: list[int]) -> Callable[[], None]:
    from megatron_patch.ops.products import product

    torch.set_num_threads(1)
    m, k, n = shape
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    torch.testing.assert_close(product(left, right, True), left @ right.T, rtol=0, atol=1e-4 * k**0.5)
    multiply = {"ours": lambda: product(left, right, True), "mm": lambda: left @ right.T}[side]
    times = max(1, round(OPERATIONS / (2 * m * k * n)))

    def work() -> None:
        for _ in range(times):
            multiply()

    return work


def main(arguments: Arguments) -> None:
    rows = []
    for shape in SHAPES:
        m, k, n = shape
        done = 2 * m * k * n * max(1, round(OPERATIONS / (2 * m * k * n))) / 1e9
        ours, theirs = (sides.measure(__file__, side, {"shape": shape}, arguments.repeats) for side in ("ours", "mm"))
        print(f"{m} x {k} by {k} x {n}: {done / ours.best_cpu:.0f} against {done / theirs.best_cpu:.0f} GFLOP/s")
        name, spread = f"products/time/{m}x{k}x{n}", sides.spread(ours)
        rows.append(sides.entry(name, "CPU s", ours.best_cpu, theirs.best_cpu, goal=1.0, repeats=arguments.repeats, spread=spread))
    sides.publish(rows, arguments.json)


if __name__ == "__main__":
    sides.serve(prepare)
    main(tyro.cli(Arguments, description=__doc__))
