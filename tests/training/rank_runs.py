"""What the tests of data parallelism run on a rank, and how they read what a run left."""

import contextlib
import io
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from megatron_patch import errors
from megatron_patch.config import TrainSettings
from megatron_patch.devices import ranks
from megatron_patch.devices.device import activate
from megatron_patch.training import setup
from megatron_patch.training.loop import train
from tests.training.test_run import flat


def train_quietly(settings: TrainSettings, kind: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a run on this rank."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = errors.run(lambda: train(settings, kind, activate("cpu")))
    return code, out.getvalue(), err.getvalue()


def train_by_rank(settings: list[TrainSettings], kind: str) -> tuple[int, str, str]:
    """Settings of its own for each rank, as a machine with another file system would have."""
    return train_quietly(settings[ranks.rank()], kind)


def train_with(event: str, at: int, settings: TrainSettings, kind: str) -> tuple[int, str, str]:
    """A run in which something happens to rank 1 in step `at` (1-based)."""
    run_step, count = setup.TrainStep.__call__, {"done": 0}

    def step(self, batches, stage):
        count["done"] += 1
        if count["done"] == at and ranks.rank() == 1:
            if event == "infinite loss":
                batches[0].loss_mask[0] = float("inf")
            elif event == "infinite gradient":
                parameter = next(p for p in self.model.parameters() if p.requires_grad)
                parameter.register_hook(lambda grad: grad * float("inf"))
            elif event == "defect":
                raise ValueError("planted")
            else:
                os.kill(os.getpid(), getattr(signal, event))
        return run_step(self, batches, stage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup.TrainStep, "__call__", step)
        return train_quietly(settings, kind)


def rewound(save: Path, iteration: int, copy: Path) -> Path:
    """A copy of a run as it stood at an earlier checkpoint."""
    name = f"iter_{iteration:07d}"
    shutil.copytree(save / name, copy / name)
    (copy / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    shutil.copy(save / "metrics.jsonl", copy)
    return copy


def training_states(checkpoint: Path) -> dict:
    """Every leaf of every training file of a checkpoint."""
    files = sorted(checkpoint.glob("training*.pt"))
    return flat({file.name: torch.load(file, weights_only=True) for file in files})


def equal(a, b) -> bool:
    """Bit for bit."""
    return torch.equal(a, b) if torch.is_tensor(a) else a == b
