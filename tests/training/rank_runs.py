"""What the tests of data parallelism run on a rank, and how they read what a run left."""

import contextlib
import dataclasses
import io
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from safetensors.torch import load_file

from megatron_patch import errors
from megatron_patch.checkpoint import save as saving
from megatron_patch.checkpoint.optimizer_state import OptimizerState
from megatron_patch.config import PRETRAIN, SFT, TrainSettings
from megatron_patch.devices import ranks
from megatron_patch.devices.device import activate, initialize_distributed
from megatron_patch.ops import backends
from megatron_patch.training import setup
from megatron_patch.training.loop import train
from tests.training.test_run import flat, rows

STEPS = 10
LAST = f"iter_{STEPS:07d}"
# Rows of unequal length (SFT), both stages, an auxiliary loss, evaluation, warm-up of the rate, clipping that acts.
FLAGS = {
    "train_iters": STEPS, "seq_length": 128, "micro_batch_size": 1, "global_batch_size": 4, "lr": 1e-3,
    "lr_warmup_iters": 2, "indexer_warmup_iters": 3, "moe_aux_loss_coeff": 0.01, "weight_decay": 0.1, "clip_grad": 0.5,
    "eval_interval": 5, "save_interval": 5, "dsa_init": "copy",
}  # fmt: skip
FORMS = {
    "pretrain": (PRETRAIN, {}),
    "sft": (SFT, {}),
    "distributed optimizer": (PRETRAIN, {"use_distributed_optimizer": True}),
    "overlap": (PRETRAIN, {"overlap_grad_reduce": True}),
    "overlap, distributed optimizer": (PRETRAIN, {"overlap_grad_reduce": True, "use_distributed_optimizer": True}),
}


def train_quietly(settings: TrainSettings, kind: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a run on this rank."""
    out, err = io.StringIO(), io.StringIO()
    groups = groups_for(settings.parallel.expert_model_parallel_size)
    with groups, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = errors.run(lambda: train(settings, kind, activate("cpu")))
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def groups_for(expert_parallel: int):
    """megatron-core's groups made anew for a layout, and back; this process has those for one already."""
    if expert_parallel == 1:
        yield
        return
    leave_groups()
    try:
        yield
    finally:
        leave_groups()
        initialize_distributed(activate("cpu"), 1)


def leave_groups() -> None:
    """End megatron-core's groups, which it only forgets: each one's threads wake a hundred times a second for as long as it lives."""
    parallel_state.destroy_model_parallel()
    for group in [each for each in dist.distributed_c10d._world.pg_map if each is not dist.group.WORLD]:
        dist.destroy_process_group(group)


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
            elif event == "disk full":
                patch.setattr(saving, "write_safetensors", no_space)
            elif event == "frozen expert moves":
                with torch.no_grad():
                    next(p for n, p in self.model.named_parameters() if "local_experts" in n and not p.requires_grad)[0] += 1
            elif event == "trained weight moves":
                with torch.no_grad():
                    next(p for n, p in self.model.named_parameters() if n.endswith("wk.weight") and p.requires_grad)[0] += 1
            elif event == "defect":
                raise ValueError("planted")
            else:
                os.kill(os.getpid(), getattr(signal, event))
        return run_step(self, batches, stage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup.TrainStep, "__call__", step)
        return train_quietly(settings, kind)


def no_space(*args):
    raise OSError(28, "No space left on device")


def rewound(save: Path, iteration: int, copy: Path) -> Path:
    """A copy of a run as it stood at an earlier checkpoint."""
    name = f"iter_{iteration:07d}"
    shutil.copytree(save / name, copy / name)
    (copy / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    shutil.copy(save / "metrics.jsonl", copy)
    return copy


def training_states(checkpoint: Path) -> dict:
    """Every leaf of every training file of a checkpoint."""
    states = {"training.pt": torch.load(checkpoint / "training.pt", weights_only=True)}
    return flat(states | {file.name: load_file(file) for file in sorted(checkpoint.glob("optimizer*"))})


def whole_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The optimizer's state of each parameter, whole, however it was cut: "KEY of NAME"."""
    state = OptimizerState(sorted(checkpoint.glob("optimizer*")))
    weights = load_file(checkpoint / "model.safetensors")
    found = {}
    for name in state.parameters:
        for key in state.keys(name):
            found[f"{key} of {name}"] = state.read(key, name, 0, weights[name].numel())
    return found


def equal(a, b) -> bool:
    """Bit for bit."""
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


def of_form(form: str) -> tuple[str, dict]:
    """(kind of training, flags); "bf16, X" is X in bf16."""
    kind, flags = FORMS[form.removeprefix("bf16, ")]
    return kind, flags | {"bf16": form.startswith("bf16, ")}


def quiet(results: list[tuple[int, str, str]]) -> None:
    """All ended well, and rank 0 alone spoke."""
    assert [code for code, _, _ in results] == [0] * len(results), results
    assert "saved iteration" in results[0][1] and f"ranks {len(results)}" in results[0][1]
    assert all(result[1:] == ("", "") for result in results[1:])


def follows(one: Path, other: Path) -> None:
    """A run is another one but for sums in another order: the bounds that the project's goals set."""
    a, b = rows(one, "train"), rows(other, "train")
    assert [row["iteration"] for row in b] == list(range(1, STEPS + 1))
    for x, y in zip(a, b, strict=True):
        assert y["lm_loss"] == pytest.approx(x["lm_loss"], rel=1e-5)
        assert y["grad_norm"] == pytest.approx(x["grad_norm"], rel=1e-3)
        assert y["indexer_kl"] == pytest.approx(x["indexer_kl"], rel=1e-3)
        assert y["index_recall"] == pytest.approx(x["index_recall"], rel=1e-4)
        assert y["learning_rate"] == x["learning_rate"]
        assert (y["consumed_samples"], y["consumed_tokens"]) == (x["consumed_samples"], x["consumed_tokens"])
    assert max(row["grad_norm"] for row in a) > FLAGS["clip_grad"], "the clipping did not act"
    finals = {row["iteration"]: row for row in rows(other, "eval")}
    for x in rows(one, "eval"):
        y = finals[x["iteration"]]
        assert y["documents"] == x["documents"] > 0
        for name in ("lm_loss", "base_lm_loss", "indexer_kl", "index_recall", "lm_loss_stderr"):
            assert y[name] == pytest.approx(x[name], rel=1e-5 if "lm_loss" in name else 1e-3), name
    close(one / LAST, other / LAST)
    assert (one / "frozen.sha256").read_text() == (other / "frozen.sha256").read_text()
    for name in ("loss.png", "config.json", "latest_checkpointed_iteration.txt"):
        assert (other / name).exists()


def close(one: Path, other: Path) -> None:
    """Weights: apart by a small part of what they moved (Adam's steps of near-zero gradients have free signs)."""
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert a.keys() == b.keys()
    apart = torch.cat([(a[name] - b[name]).flatten() for name in a])
    start = load_file(one.with_name("iter_0000005") / "model.safetensors")
    moved = torch.cat([(a[name] - start[name]).flatten() for name in a])
    assert apart.norm() < 2e-3 * moved.norm(), (apart.norm(), moved.norm())


def steps_of_adam(checkpoint: Path) -> set[float]:
    """The numbers of steps that AdamW has counted, of any parameter."""
    return {float(value) for name, value in training_states(checkpoint).items() if ".safetensors/step/" in name}


def same_run(one: Path, other: Path) -> None:
    """Weights, every training state and every number of two runs, bit for bit."""
    a, b = (load_file(save / LAST / "model.safetensors") for save in (one, other))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    a, b = (training_states(save / LAST) for save in (one, other))
    assert a.keys() == b.keys() and all(equal(value, b[name]) for name, value in a.items())
    names = ("iteration", "lm_loss", "indexer_kl", "grad_norm", "learning_rate", "consumed_tokens")
    assert [[row[n] for n in names] for row in rows(one, "train")] == [[row[n] for n in names] for row in rows(other, "train")]


def choices_of(settings: TrainSettings, kind: str) -> dict[str, list[torch.Tensor]]:
    """A run, and what its routers ([T, experts] each) and indexers ([T, k], sorted) chose in training, in order."""
    found: dict[str, list[torch.Tensor]] = {"routes": [], "indices": []}
    route, usual = TopKRouter.forward, backends.choose_backend("auto", "cpu")

    def forward(self, *args, **kwargs):
        probs, routes = route(self, *args, **kwargs)
        found["routes"].append(routes.cpu().clone())
        return probs, routes

    def attention(*args, **kwargs):
        result = usual.attention(*args, **kwargs)
        found["indices"].append(result.indices.sort(-1).values.cpu())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TopKRouter, "forward", forward)
        patch.setitem(backends.BACKENDS, usual.name, dataclasses.replace(usual, attention=attention))
        code, _, err = train_quietly(settings, kind)
    assert code == 0, err
    return found
