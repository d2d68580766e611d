"""Whole runs: resume, freeze, stop, skip, and what they leave behind."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from megatron.core import optimizer as mcore_optimizer
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_patch import errors
from megatron_patch.checkpoint.export import export
from megatron_patch.config import PRETRAIN, SFT
from megatron_patch.data.batch_file import read_batches
from megatron_patch.data.sft_dataset import SftDataset
from megatron_patch.data.show import ShowSettings, show_samples
from megatron_patch.errors import NonFiniteError, UserError
from megatron_patch.model.architecture import DsaSettings, read_architecture
from megatron_patch.ops import by_length
from megatron_patch.ops.backends import BACKENDS, choose_backend
from megatron_patch.planning.parameters import count, parts
from megatron_patch.training import loop, setup
from megatron_patch.training.loop import train
from tests.checkpoint.models import DSA
from tests.checkpoint.runs import write_run
from tests.ops.npu_contract import Contract


def rows(save, kind=None):
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if kind in (None, row["kind"])]


def flat(state, prefix=""):
    """Every leaf of a nested state by path."""
    if isinstance(state, dict):
        return {k: v for key, value in state.items() for k, v in flat(value, f"{prefix}/{key}").items()}
    if isinstance(state, list | tuple):
        return {k: v for i, value in enumerate(state) for k, v in flat(value, f"{prefix}/{i}").items()}
    return {prefix: state}


FORMS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "distributed optimizer": {"use_distributed_optimizer": True},
    "bf16, distributed optimizer": {"bf16": True, "use_distributed_optimizer": True},
    "sgd": {"optimizer": "sgd"},
    "muon": {"optimizer": "muon"},
    "bf16, muon": {"bf16": True, "optimizer": "muon"},
    "sft": {"kind": SFT},
    "recompute": {"recompute_dsa": True, "moe_aux_loss_coeff": 0.01},
}


@pytest.mark.parametrize("form", FORMS)
def test_resume_equals_the_uninterrupted_run(device, make_settings, text_prefix, sft_folder, tmp_path, form):
    flags = dict(FORMS[form])
    kind = flags.pop("kind", PRETRAIN)
    data = sft_folder if kind == SFT else text_prefix
    flags |= {"seq_length": 128, "indexer_warmup_iters": 2, "lr_warmup_iters": 2, "eval_interval": 3}
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train(make_settings(whole, data, **flags), kind, device)
    train(make_settings(halves, data, **flags, exit_duration_in_mins=0.0, save_interval=1), kind, device)
    assert (halves / "latest_checkpointed_iteration.txt").read_text() == "0\n"  # saved before the first step
    settings = make_settings(halves, data, **flags, load=halves)
    stop_after(settings, 4, kind, device)
    assert (halves / "latest_checkpointed_iteration.txt").read_text() == "4\n"
    train(settings, kind, device)
    name = "iter_0000006/model.safetensors"
    a, b = load_file(whole / name), load_file(halves / name)
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    files = ("training.pt", "optimizer_rank0000.safetensors")
    read = {files[0]: lambda file: torch.load(file, weights_only=True), files[1]: load_file}
    states = [flat({name: read[name](d / "iter_0000006" / name) for name in files}) for d in (whole, halves)]
    assert states[0].keys() == states[1].keys() and len(states[0]) > 60
    for key, value in states[0].items():
        same = torch.equal(value, states[1][key]) if torch.is_tensor(value) else value == states[1][key]
        assert same, key
    numbers = ("iteration", "consumed_samples", "consumed_tokens", "lm_loss", "indexer_kl", "grad_norm", "learning_rate")
    kept = [[[row[n] for n in numbers] for row in rows(d, "train")] for d in (whole, halves)]
    assert kept[0] == kept[1] and len(kept[0]) == 6
    finals = [rows(d, "eval")[-1] for d in (whole, halves)]
    assert finals[0]["lm_loss"] == finals[1]["lm_loss"] and finals[0]["iteration"] == 6


def stop_after(settings, iterations, kind, device):
    """Run until a SIGTERM that arrives in step `iterations`."""
    run_step = setup.TrainStep.__call__
    count = {"done": 0}

    def step(self, batches, stage):
        count["done"] += 1
        if count["done"] == iterations:
            os.kill(os.getpid(), signal.SIGTERM)
        return run_step(self, batches, stage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup.TrainStep, "__call__", step)
        assert train(settings, kind, device) == 0


class GroupAdamW(torch.optim.Optimizer):
    """AdamW as MindSpeed's and Transformer Engine's: it counts the steps of a parameter group."""

    def __init__(self, params, lr, weight_decay, betas, eps, adam_w_mode):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (b1, b2), count = group["betas"], group["step"]
            for own in group["params"]:
                state = self.state[own]
                if not state:
                    state |= {"exp_avg": torch.zeros_like(own), "exp_avg_sq": torch.zeros_like(own)}
                first, second = state["exp_avg"].lerp_(own.grad, 1 - b1), state["exp_avg_sq"]
                second.mul_(b2).addcmul_(own.grad, own.grad, value=1 - b2)
                own.mul_(1 - group["lr"] * group["weight_decay"])
                size = (second / (1 - b2**count)).sqrt_().add_(group["eps"])
                own.addcdiv_(first, size, value=-group["lr"] / (1 - b1**count))


@pytest.mark.parametrize("flags", [{}, {"bf16": True, "use_distributed_optimizer": True}], ids=["fp32", "bf16, distributed optimizer"])
def test_steps_that_a_group_counts_are_resumed(device, make_settings, text_prefix, tmp_path, monkeypatch, flags):
    """Else the moments' bias were corrected as at the first step, without a word; and a run goes on under PyTorch's AdamW."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    with monkeypatch.context() as patch:
        patch.setattr(mcore_optimizer, "USING_PYTORCH_OPTIMIZER", False)
        for module in (mcore_optimizer, mcore_optimizer.distrib_optimizer):
            patch.setattr(module, "Adam", GroupAdamW)
        train(make_settings(whole, text_prefix, **flags, save_interval=4), PRETRAIN, device)
        stop_after(make_settings(halves, text_prefix, **flags), 4, PRETRAIN, device)
        shutil.copytree(halves, tmp_path / "other")
        train(make_settings(halves, text_prefix, **flags, load=halves), PRETRAIN, device)
    name = "iter_0000006/model.safetensors"
    a, b = load_file(whole / name), load_file(halves / name)
    assert all(torch.equal(a[key], b[key]) for key in a)
    train(make_settings(tmp_path / "other", text_prefix, **flags, load=tmp_path / "other"), PRETRAIN, device)
    names = ("lm_loss", "grad_norm")
    curves = [[[row[n] for n in names] for row in rows(d, "train")] for d in (whole, tmp_path / "other")]
    torch.testing.assert_close(torch.tensor(curves[1]), torch.tensor(curves[0]), rtol=1e-4, atol=0)


def test_a_signal_while_the_base_loads_is_not_lost(device, make_settings, text_prefix, tmp_path, monkeypatch):
    def signalled_set_up(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return setup.set_up(*args)

    monkeypatch.setattr(loop, "set_up", signalled_set_up)
    assert train(make_settings(tmp_path / "run", text_prefix), PRETRAIN, device) == 0
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "0\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "the handlers were not given back"


def test_a_run_leaves_what_the_interface_says(device, make_settings, text_prefix, tmp_path):
    save = tmp_path / "run"
    settings = make_settings(
        save, text_prefix, eval_interval=3, save_interval=2, keep_last=2, tensorboard_dir=tmp_path / "tb", peak_tflops=2.0
    )
    train(settings, PRETRAIN, device)
    assert sorted(p.name for p in save.glob("iter_*")) == ["iter_0000004", "iter_0000006"]
    for name in ("metrics.jsonl", "loss.png", "config.json", "frozen.sha256"):
        assert (save / name).stat().st_size > 0
    assert list((tmp_path / "tb").iterdir())
    manifest = json.loads((save / "iter_0000006/manifest.json").read_text())
    assert manifest["frozen_sha256"] + "\n" == (save / "frozen.sha256").read_text()
    assert manifest["layer_pattern"] == ["mla"] * 3 + ["dsa"] * 2 and manifest["consumed_samples"] == 24
    evaluations = rows(save, "eval")
    assert [row["iteration"] for row in evaluations] == [0, 3, 6]
    # Identity: before the first step the model is the base.
    assert evaluations[0]["lm_loss_delta"] == 0.0 and evaluations[0]["lm_loss"] == evaluations[0]["base_lm_loss"]
    assert evaluations[-1]["lm_loss_delta"] < 0
    trained = rows(save, "train")
    assert [row["iteration"] for row in trained] == [1, 2, 3, 4, 5, 6]
    assert all(0 < row["index_recall"] <= 1 and row["indexer_kl"] >= 0 for row in trained)
    assert all(row["tflops_per_device"] > 0 and row["mfu"] == row["tflops_per_device"] / 2 for row in trained)
    weights = load_file(save / "iter_0000006/model.safetensors")
    assert all(name.startswith(("decoder.layers.3.", "decoder.layers.4.")) for name in weights)


def test_recall_is_computed_for_rows_and_evaluations_alone(device, make_settings, text_prefix, tmp_path, monkeypatch):
    """It costs the logits of dense attention in every DSA layer. The other numbers stay means over the row's steps."""
    run_step, results = setup.TrainStep.__call__, []

    def spy(self, batches, stage):
        results.append(run_step(self, batches, stage))
        return results[-1]

    monkeypatch.setattr(setup.TrainStep, "__call__", spy)
    train(make_settings(tmp_path / "run", text_prefix, log_interval=4, eval_interval=3), PRETRAIN, device)
    assert [math.isnan(result.index_recall) for result in results] == [True, True, True, False, True, False]
    trained, evaluations = rows(tmp_path / "run", "train"), rows(tmp_path / "run", "eval")
    assert [row["index_recall"] for row in trained] == [results[3].index_recall, results[5].index_recall]
    assert trained[1]["indexer_kl"] == pytest.approx((results[4].indexer_kl + results[5].indexer_kl) / 2)
    assert all(0 < row["index_recall"] <= 1 for row in evaluations)


def test_other_backends_train_as_the_chunked_one(device, make_settings, tiny_base, text_prefix, tmp_path, monkeypatch, capsys):
    """The loss curve of the op that was the default before, to rounding: warm-up and sparse stage. Ascend's through the emulator
    of its operators; which form of the KL it takes, and why, is said once, beside the counts that a plan gives."""
    monkeypatch.setitem(sys.modules, "torch_npu", Contract(wide=True))
    ascend = dataclasses.replace(BACKENDS["npu"], check=None)  # the tiny base has none of the operators' sizes
    monkeypatch.setattr(setup, "choose_backend", lambda name, kind: ascend if name == "auto" else choose_backend(name, kind))
    monkeypatch.setattr(by_length, "LONG_DOCUMENT", 24)  # some packs have a longer document
    curves = {}
    for backend in ("chunked", "sparse", "by-length", "auto"):
        # 4 index heads tie often, and the order of ties is the Ascend operator's own.
        flags = {"dsa_backend": backend, "indexer_warmup_iters": 2, "index_n_heads": 32}
        train(make_settings(tmp_path / backend, text_prefix, **flags), PRETRAIN, device)
        names = ("lm_loss", "indexer_kl", "index_recall", "grad_norm")
        curves[backend] = torch.tensor([[row[name] for name in names] for row in rows(tmp_path / backend, "train")])
    assert len(curves["chunked"]) == 6
    # Measured 1e-7; sums in another order move parameters, and what that does grows from step to step.
    for other in ("sparse", "by-length", "auto"):
        torch.testing.assert_close(curves[other], curves["chunked"], rtol=1e-5, atol=0)
    out = capsys.readouterr().out
    assert out.count("DSA backend npu (KL chunked: the fused operator takes 32, 64 or 128 attention heads, not 4)") == 1
    _, planned = count(parts(read_architecture(tiny_base), ("mla",) * 3 + ("dsa",) * 2, DsaSettings(8, 32, 16)))
    assert out.count(f"{planned.total / 1e6:,.2f}M parameters, {planned.trainable / 1e6:,.2f}M of them train") == 4


def test_wandb_offline_and_tensorboard_hold_the_rows(device, make_settings, text_prefix, tmp_path):
    """A resumed run goes on with the same wandb run, and both logs hold each step once."""
    save = tmp_path / "run"
    flags = {"wandb_project": "demo", "tensorboard_dir": tmp_path / "tb", "eval_interval": 3, "seq_length": 128}
    stop_after(make_settings(save, text_prefix, **flags), 4, PRETRAIN, device)
    train(make_settings(save, text_prefix, **flags, load=save), PRETRAIN, device)
    offline = list((save / "wandb").glob("offline-run-*"))
    assert len(offline) == 2 and len({folder.name.rsplit("-", 1)[1] for folder in offline}) == 1
    assert all(list(folder.glob("run-*.wandb")) for folder in offline)
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/lm_loss")]
    expected = [(row["iteration"], pytest.approx(row["lm_loss"], rel=1e-6)) for row in rows(save, "train")]
    assert losses == expected and [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]


def test_a_frozen_weight_that_moved_stops_the_run(device, make_settings, text_prefix, tmp_path):
    """Checked at every save: what trains is not written beside a base that is no longer the base."""
    run = setup.set_up(make_settings(tmp_path / "run", text_prefix), PRETRAIN, device)
    with torch.no_grad():
        run.model.decoder.layers[0].mlp.linear_fc1.weight[0, 0] += 1e-3
    with pytest.raises(RuntimeError, match="a frozen parameter or buffer moved"):
        loop._save(run)
    assert not list((tmp_path / "run").glob("iter_*"))
    run.metrics.close()


def test_a_finished_run_resumed_again_changes_nothing(device, make_settings, text_prefix, tmp_path):
    save = tmp_path / "run"
    train(make_settings(save, text_prefix, eval_interval=4), PRETRAIN, device)
    before = (save / "metrics.jsonl").read_text()
    assert [row["iteration"] for row in rows(save, "eval")] == [0, 4, 6]
    train(make_settings(save, text_prefix, eval_interval=4, load=save), PRETRAIN, device)
    assert (save / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"optimizer": "muon"}, "a resumed run keeps its --optimizer: .* has adam, the command line muon"),
        ({"seed": 7}, "a resumed run keeps its --seed: .* has 1234, the command line 7"),
        ({"bf16": True}, "a resumed run keeps its --bf16: .* has False, the command line True"),
        ({"train_iters": 1}, "--train-iters counts from the run's start: 1 is below iteration 2"),
    ],
)
def test_a_resumed_run_stays_the_same_run(device, make_settings, text_prefix, tmp_path, flags, message):
    save = tmp_path / "run"
    train(make_settings(save, text_prefix, train_iters=2), PRETRAIN, device)
    with pytest.raises(UserError, match=message):
        train(make_settings(save, text_prefix, load=save, **flags), PRETRAIN, device)


def test_a_damaged_record_of_the_settings_is_refused(device, make_settings, text_prefix, tmp_path):
    save = tmp_path / "run"
    train(make_settings(save, text_prefix, train_iters=1), PRETRAIN, device)
    for content in ("{", "[]", '{"settings": 3}', '{"settings": {"seed": 1, "seed": 2}}'):
        (save / "config.json").write_text(content)
        with pytest.raises(UserError, match=r"a run's config\.json holds its settings: .*; copy it again"):
            train(make_settings(save, text_prefix, load=save), PRETRAIN, device)


def test_two_runs_into_one_save_are_refused(device, make_settings, text_prefix, tmp_path):
    """The other holder is a process of its own, as an orphan of a killed script is; its end frees the directory."""
    save = tmp_path / "run"
    train(make_settings(save, text_prefix, train_iters=1), PRETRAIN, device)
    code = f"""
import pathlib, sys
from megatron_patch.io.lock import only_writer
with only_writer(pathlib.Path({str(save)!r}), "--save"):
    print("held", flush=True)
    sys.stdin.read()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        settings = make_settings(save, text_prefix, load=save)
        with pytest.raises(UserError, match=r"one run at a time writes to --save: .* is in use by another process"):
            train(settings, PRETRAIN, device)
    finally:
        holder.kill()
        holder.wait()
    assert train(settings, PRETRAIN, device) == 0


def poison(monkeypatch, bad_steps):
    """Make the loss of these steps (1-based) infinite."""
    run_step, count = setup.TrainStep.__call__, {"done": 0}

    def step(self, batches, stage):
        count["done"] += 1
        if count["done"] in bad_steps:
            batches[0].loss_mask[0] = float("inf")
        return run_step(self, batches, stage)

    monkeypatch.setattr(setup.TrainStep, "__call__", step)


def test_non_finite_steps_are_skipped_and_counted(device, make_settings, text_prefix, tmp_path, monkeypatch):
    poison(monkeypatch, {2, 4})
    train(make_settings(tmp_path / "run", text_prefix), PRETRAIN, device)
    assert [row["iteration"] for row in rows(tmp_path / "run", "skip")] == [2, 4]
    assert rows(tmp_path / "run")[-1]["skipped"] == 2
    weights = load_file(tmp_path / "run/iter_0000006/model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("kind", [PRETRAIN, SFT])
def test_non_finite_in_a_row_ends_with_code_3(device, make_settings, text_prefix, sft_folder, tmp_path, monkeypatch, capsys, kind):
    """What the last step saw is kept, and can be looked at."""
    poison(monkeypatch, {3, 4})
    data = sft_folder if kind == SFT else text_prefix
    settings = make_settings(tmp_path / "run", data, max_non_finite_steps=2, seq_length=128)
    assert errors.run(lambda: train(settings, kind, device)) == 3
    said = capsys.readouterr().err
    assert "not finite 2 steps in a row" in said and f"{tmp_path}/run/non_finite/iter_0000004_rank*.safetensors" in said
    assert not list((tmp_path / "run").glob("iter_*"))
    [file] = (tmp_path / "run/non_finite").iterdir()
    kept, _ = read_batches(file)
    assert [each.positions for each in kept] == [[12, 13], [14, 15]]
    assert [math.isfinite(each.loss) for each in kept] == [False, True] and kept[0].batch.loss_mask[0] == float("inf")
    show_samples(ShowSettings(str(file), n=1))
    shown = capsys.readouterr().out
    assert f"{kind}, iteration 4, rank 0: 2 micro-batches" in shown and "1 entries of the loss mask are not finite" in shown
    assert "micro-batch 1:" in shown and "micro-batch 2:" not in shown and "loss inf; samples 12 to 13" in shown
    if kind == SFT:  # the numbers are those of the folder, of which a part trains
        samples, bounds = SftDataset(sft_folder, seq_length=128), kept[1].batch.cu_seqlens.tolist()
        for row, begin, end in zip(kept[1].rows, bounds, bounds[1:], strict=False):
            ids, _ = samples.sample(row)
            assert kept[1].batch.tokens[begin:end].tolist() == ids[:-1].tolist()
    with pytest.raises(NonFiniteError):
        raise NonFiniteError  # the exception stays apart from UserError, whose code is 2
    assert not issubclass(NonFiniteError, UserError)


@pytest.mark.parametrize("start", ["checkpoint", "export"])
def test_sft_starts_from_pretraining(device, make_settings, tiny_base, text_prefix, sft_folder, tmp_path, start):
    train(make_settings(tmp_path / "pre", text_prefix, lr=5e-3), PRETRAIN, device)
    if start == "export":
        export(tmp_path / "pre", tiny_base, tmp_path / "export", progress=False)
    first = tmp_path / ("pre" if start == "checkpoint" else "export")
    flags = {"lr": 0.0, "min_lr": 0.0, "train_iters": 1, "seq_length": 128, "pretrained_checkpoint": first}
    train(make_settings(tmp_path / "sft", sft_folder, **flags), SFT, device)
    pre = load_file(tmp_path / "pre/iter_0000006/model.safetensors")
    sft = load_file(tmp_path / "sft/iter_0000001/model.safetensors")
    assert pre.keys() == sft.keys() and all(torch.equal(pre[key], sft[key]) for key in pre)


@pytest.mark.parametrize(
    "flags, spoil, message",
    [
        ({"index_topk": 4}, None, "an export belongs to one dsa"),
        ({"layer_pattern": "mla*3,dsa*1"}, None, "an export belongs to one layer_pattern"),
        ({}, "weights", "an export's files must be as written: .*model-dsa.* has changed"),
        ({}, "manifest", "an export's manifest must be whole"),
    ],
)
def test_an_export_that_does_not_fit_is_refused(
    device, make_settings, tiny_base, text_prefix, tmp_path, flags, spoil, message
):
    write_run(tmp_path / "run", tiny_base)
    export(tmp_path / "run", tiny_base, tmp_path / "export", progress=False)
    name = {"weights": "model-dsa-00001-of-00001.safetensors", "manifest": "upcycle_manifest.json"}.get(spoil)
    if name is not None:
        file = next((tmp_path / "export").glob("*dsa*.safetensors")) if spoil == "weights" else tmp_path / "export" / name
        file.write_bytes(file.read_bytes()[:-9] + b"\0" * 9)
    flags = {"index_topk": DSA.index_topk, "index_n_heads": DSA.index_n_heads, "index_head_dim": DSA.index_head_dim} | flags
    with pytest.raises(UserError, match=message):
        train(make_settings(tmp_path / "new", text_prefix, **flags, pretrained_checkpoint=tmp_path / "export"), PRETRAIN, device)


REFUSED = {
    "global batch": ({"global_batch_size": 5}, r"--global-batch-size must be a multiple.*5 is not a multiple of 2 x 1; use e\.g\. 4"),
    "topk": ({"index_topk": 0}, "--index-topk must be positive: 0"),
    "tensor parallel": ({"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size must be 1"),
    "expert parallel": ({"expert_model_parallel_size": 2}, "ranks must be a multiple of --expert-model-parallel-size: 1 ranks, 2"),
    "context parallel": ({"context_parallel_size": 2}, "--context-parallel-size must be 1"),
    "pattern": ({"layer_pattern": "mla*2,dsa*2"}, "must be the base's 3 mla layers followed by dsa layers"),
    "pattern text": ({"layer_pattern": "mla*3,gqa*2"}, "'gqa\\*2'"),
    "nothing trains": ({"layer_pattern": "mla*3"}, "something must train"),
    "head dim": ({"index_head_dim": 4}, "--index-head-dim must hold the base's 8 RoPE dimensions: 4"),
    "min lr": ({"min_lr": 1.0}, "--min-lr must not exceed --lr"),
    "warmup": ({"lr_warmup_iters": 6}, "--lr-warmup-iters must be below --train-iters"),
    "indexer warmup": ({"indexer_warmup_iters": 7}, "--indexer-warmup-iters must not exceed"),
    "no held-out share": ({"split": "100,0", "eval_interval": 2}, "--split"),
    "two starts": ({"load": "x", "pretrained_checkpoint": "y"}, "exclude each other"),
    "load nothing": ({"load": "/nonexistent"}, "a --save directory has latest_checkpointed_iteration.txt"),
    "base missing": ({"base_model": "/nonexistent"}, "has none; give the directory that holds config.json"),
    "data missing": ({"data_path": "/nonexistent/x"}, "not readable|missing"),
    "npu backend": ({"dsa_backend": "npu"}, "runs on (--device )?npu"),
    "profile": ({"profile_steps": "5:2"}, "--profile-steps must be A:B"),
    "profile in superscript": ({"profile_steps": "²:³"}, "--profile-steps must be A:B"),
    "profile beyond the end": ({"profile_steps": "99:100"}, "--profile-steps must begin within --train-iters: 99 > "),
    "cache": ({"trunk_cache": __file__}, "--trunk-cache must be a directory"),
    "muon, distributed optimizer": (
        {"optimizer": "muon", "use_distributed_optimizer": True},
        "--optimizer muon needs whole matrices",
    ),
    "not a number": ({"lr": "fast"}, "lr"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_training(device, make_settings, text_prefix, tmp_path, case, capsys):
    flags, message = REFUSED[case]
    data = flags.pop("data_path", text_prefix) if "data_path" in flags else text_prefix

    def main():
        return train(make_settings(tmp_path / "run", data, **flags), PRETRAIN, device)

    assert errors.run(main) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ")
    import re

    assert re.search(message, said), said
    assert not list((tmp_path / "run").glob("iter_*"))


def test_save_directory_rules(device, make_settings, text_prefix, tmp_path):
    save = tmp_path / "run"
    save.mkdir()
    (save / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="--save must be new or empty"):
        train(make_settings(save, text_prefix), PRETRAIN, device)
    assert [p.name for p in save.iterdir()] == ["notes.txt"]


def test_checkpoint_of_another_structure_is_refused(device, make_settings, text_prefix, sft_folder, tmp_path):
    train(make_settings(tmp_path / "pre", text_prefix, train_iters=1), PRETRAIN, device)
    for flags, message in [
        ({"index_topk": 9}, "belongs to one indexer"),
        ({"dsa_layers": 1}, "belongs to one layer pattern"),
    ]:
        with pytest.raises(UserError, match=message):
            train(make_settings(tmp_path / "x", text_prefix, load=tmp_path / "pre", **flags), PRETRAIN, device)
    with pytest.raises(UserError, match="belongs to one kind of training"):
        train(make_settings(tmp_path / "x", sft_folder, load=tmp_path / "pre"), SFT, device)
    weights = tmp_path / "pre/iter_0000001/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"files must be as saved: .*model\.safetensors"):
        train(make_settings(tmp_path / "x", text_prefix, load=tmp_path / "pre"), PRETRAIN, device)


def test_several_processes_without_torchrun_are_refused(device, make_settings, text_prefix, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="WORLD_SIZE is 2 and there is no RANK; use torchrun --nproc-per-node 2"):
        train(make_settings(tmp_path / "run", text_prefix), PRETRAIN, device)
