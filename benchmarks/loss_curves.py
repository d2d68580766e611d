"""The loss curve of a run with one DSA op against that of the same run with another: an optimisation must not show in it.

    bash examples/quickstart.sh --fast --output runs/quickstart
    OMP_NUM_THREADS=1 python benchmarks/loss_curves.py --quickstart runs/quickstart --output runs/loss_curves

Two runs of pretrain_upcycle.py on the quickstart's base and text, rows of one document each (--no-isolate-documents), so that
the documents are long. They part where two keys score nearly alike: sums in another order then choose another. Until then,
and with --lr 0 to the end, they differ by rounding. Prints the largest relative difference of each column, and draws both curves.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import sides
import tyro

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLUMNS = ("lm_loss", "indexer_kl", "grad_norm")
BOUND = {"lm_loss": 1e-4, "indexer_kl": 1e-2, "grad_norm": 1e-2}


@dataclass
class Arguments:
    quickstart: Path
    """What a quickstart wrote: its base and tokens are used."""
    output: Path
    """Must be empty or not there: the runs and loss_curves.png go there."""
    before: str = "chunked"
    after: str = "sparse"
    steps: int = 40
    seq_length: int = 512
    lr: float = 1e-3
    json: Path | None = None
    """Also write the figures here."""


def curve(arguments: Arguments, backend: str) -> dict[str, list[float]]:
    save = arguments.output / backend
    command = [
        sys.executable, sides.ROOT / "pretrain_upcycle.py", "--base-model", arguments.quickstart / "base",
        "--data-path", arguments.quickstart / "data" / "text", "--save", save, "--dsa-backend", backend, "--no-isolate-documents",
        "--seq-length", arguments.seq_length, "--index-topk", 64, "--index-n-heads", 4, "--index-head-dim", 32, "--dsa-init", "copy",
        "--micro-batch-size", 2, "--global-batch-size", 4, "--train-iters", arguments.steps, "--indexer-warmup-iters", 8,
        "--lr", arguments.lr, "--min-lr", arguments.lr / 10, "--log-interval", 1, "--eval-interval", 0,
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), env={**os.environ, "PYTHONPATH": str(sides.ROOT)}, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"error: the run with {backend} ended with {done.returncode}; its message is above")
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    found = {name: [row[name] for row in rows if name in row] for name in COLUMNS}
    for name, values in found.items():
        if None in values:
            raise SystemExit(f"error: {name} must be finite: with {backend} it is not in step {values.index(None) + 1}; give a lower --lr")
    return found


def main(arguments: Arguments) -> None:
    before, after = (curve(arguments, backend) for backend in (arguments.before, arguments.after))
    rows = []
    for name in COLUMNS:
        apart = [abs(a - b) / abs(b) for a, b in zip(after[name], before[name], strict=True)]
        print(f"{name}: {len(apart)} steps, apart by at most {max(apart):.1e} of the value; in the first half {max(apart[: len(apart) // 2], default=0.0):.1e}")
        rows.append(sides.entry(f"loss_curves/{name}", "relative", max(apart), BOUND[name], goal=1.0, repeats=1, spread=None))
    figure, axes = plt.subplots(1, len(COLUMNS), figsize=(12, 3.5), layout="constrained")
    for axis, name in zip(axes, COLUMNS, strict=True):
        axis.plot(before[name], label=arguments.before, linewidth=3, alpha=0.5)
        axis.plot(after[name], label=arguments.after, linewidth=1)
        axis.set(title=name, xlabel="step")
    axes[0].legend()
    figure.savefig(arguments.output / "loss_curves.png", dpi=120)
    sides.publish(rows, arguments.json)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
