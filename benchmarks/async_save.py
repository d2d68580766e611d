"""How long a step's boundary waits for a checkpoint: written by a thread (`--async-save`) against written at once.

    python benchmarks/async_save.py --json runs/async_save.json

Random weights and AdamW's two moments of them, fp32, in tensors of 4 MiB, on the CPU. What training loses afterwards to the thread
that writes is not in it, and nor is the hash of the frozen base, which the thread also takes.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sides
import torch
import tyro

GOAL = 1.0


@dataclass
class Arguments:
    megabytes: int = 1200
    """Size of the checkpoint."""
    repeats: int = 3
    folder: Path | None = None
    """Where to write; default: the system's place for temporary files."""
    json: Path | None = None
    """Also write the figures here."""


def prepare(side: str, megabytes: int, folder: str | None) -> Callable[[], None]:
    from megatron_patch.checkpoint.save import Identity, Progress, take_snapshot
    from megatron_patch.checkpoint.saver import Saver
    from megatron_patch.model.architecture import DsaSettings

    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.rand(1024, 1024)) for _ in range(megabytes // 12)]
    model = torch.nn.ParameterList(parameters)
    moments = {f"{key}/{i}/0": torch.rand(2**20) for key in ("exp_avg", "exp_avg_sq") for i in range(len(parameters))}
    identity = Identity("pretrain", "base", "0" * 64, ("mla", "dsa"), DsaSettings(8, 4, 16), 64, "0" * 64)
    place = tempfile.TemporaryDirectory(dir=folder)
    saver, background = Saver(keep_last=0), side == "async"

    def work(place=place) -> None:  # the directory lives as long as this
        snapshot = take_snapshot(
            Path(place.name), model, {}, identity, Progress(1), optimizer_state=moments, copy=background
        )
        saver.save(snapshot, background=background)

    return work


def main(arguments: Arguments) -> None:
    folder = None if arguments.folder is None else str(arguments.folder)
    case = {"megabytes": arguments.megabytes, "folder": folder}
    # A process saves once: a second save would wait for the first one's thread.
    ours, theirs = ([sides.measure(__file__, side, case, 1) for _ in range(arguments.repeats)] for side in ("async", "waiting"))
    best = [min(each.best for each in runs) for runs in (ours, theirs)]
    spread = (max(each.best for each in ours) - best[0]) / best[0]
    name = f"async_save/{{}}/megabytes={arguments.megabytes}"
    memory = [max(each.memory for each in runs) for runs in (ours, theirs)]
    sides.publish(
        [
            sides.entry(name.format("wait"), "s", *best, goal=GOAL, repeats=arguments.repeats, spread=spread),
            sides.entry(name.format("memory"), "MiB", *memory, goal=None, repeats=arguments.repeats, spread=None),
        ],
        arguments.json,
    )


if __name__ == "__main__":
    sides.serve(prepare)
    main(tyro.cli(Arguments, description=__doc__))
