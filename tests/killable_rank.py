"""One rank of `tests.killable`; imported once, in the server that ranks are forked from."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import torch

from megatron_patch import errors
from megatron_patch.checkpoint import save as saving
from megatron_patch.config import TrainSettings
from megatron_patch.devices.device import activate

torch.set_num_threads(1)
_DEVICE = activate("cpu")

from megatron_patch.training.loop import train  # noqa: E402 (the device comes before megatron.core)


def run_rank(
    rank: int, count: int, meeting: dict[str, str], settings: TrainSettings, kind: str, log: Path, kill_at: str | None,
    write_seconds: float,
) -> None:  # fmt: skip
    """Train as a rank of `count`, the output going to the end of `log`; end with the run's exit code."""
    os.environ |= meeting | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
    }  # fmt: skip
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(output, standard)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    if kill_at is not None and rank == 0:
        plant(kill_at)
    if write_seconds:
        slow_down(write_seconds)
    code = 1
    try:
        code = errors.run(lambda: train(settings, kind, _DEVICE))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the server's exit handlers are not this process's


def slow_down(seconds: float) -> None:
    """Checkpoints of the tiny base are written in a moment; those of a user's are not. Half before the files, half after."""
    write = saving.write_snapshot

    def slow(snapshot, directory):
        time.sleep(seconds / 2)
        hashes = write(snapshot, directory)
        time.sleep(seconds / 2)
        return hashes

    saving.write_snapshot = slow


def plant(event: str) -> None:
    """Kill this process (-9) at a moment of its second checkpoint, which drops the first."""

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    calls = {"weights": 0}
    write, manifest = saving.write_safetensors, saving.TrainingManifest.write

    def second() -> bool:
        return calls["weights"] > 2  # two files a checkpoint

    def write_safetensors(path, tensors):
        calls["weights"] += 1
        sha256 = write(path, tensors)
        if event == "weights written" and second():
            die()
        return sha256

    def write_manifest(self, directory):
        manifest(self, directory)
        if event == "manifest written" and second():
            die()

    point = saving._point_to_latest

    def point_to_latest(*args):
        if event == "published" and second():
            die()
        if event == "old one half removed" and second():
            saving.shutil.rmtree = remove_half
        point(*args)

    def remove_half(directory):
        (Path(directory) / "model.safetensors").unlink()
        die()

    assert shutil.rmtree is saving.shutil.rmtree
    saving.write_safetensors, saving.TrainingManifest.write = write_safetensors, write_manifest
    saving._point_to_latest = point_to_latest
