"""--profile-steps: the parts of a step add up, each is charged with its own work, and nothing stays behind."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_patch.model.builder import forward_pack, packed_seq_params
from megatron_patch.model.trunk import trunk_output
from megatron_patch.training import profile
from megatron_patch.training.optimizer import build_optimizer, wrap_ddp
from megatron_patch.training.profile import PARTS, StepProfile
from megatron_patch.training.step import TrainStep
from tests.model.build import tiny_model
from tests.training.test_step import batches, no_flops


class Clock:
    """Stands still but for what is slowed down."""

    def __init__(self):
        self.now = 0.0

    def slow(self, function):
        def slowed(*args, **kwargs):
            self.now += 1.0
            return function(*args, **kwargs)

        return slowed


@pytest.fixture
def step(device, tiny_base, make_settings, tmp_path):
    model, state, pattern = tiny_model(tiny_base, init="copy")
    settings = make_settings(tmp_path, "unused", optimizer="sgd", lr=0.0, min_lr=0.0).optim
    ddp = wrap_ddp(model, use_distributed_optimizer=False)
    optimizer = build_optimizer(ddp, settings, bf16=False, use_distributed_optimizer=False)
    return TrainStep(ddp, optimizer, state, device, 1.0, no_flops), pattern


def run(step, pattern, save, steps=(2, 3), taken=3):
    with StepProfile(steps, step, pattern, save) as profiled:
        for iteration in range(1, taken + 1):
            profiled.begin(iteration)
            data = batches([(30, 3), (20, 4)], 1)
            profiled.data_is_there()
            step(data, "sparse")
            profiled.end(iteration)


@pytest.mark.parametrize("part", ["trunk", "DSA layers", "head and loss", "gradient sums", "optimizer"])
def test_a_part_that_takes_time_is_the_one_that_is_charged(step, tmp_path, part, monkeypatch):
    step, pattern = step
    model, clock = step.model.module, Clock()
    holder, name, calls = {
        "trunk": (model.decoder.layers[1], "forward", 2),
        "DSA layers": (model.decoder.layers[-1], "forward", 2),
        "head and loss": (model.decoder.final_layernorm, "forward", 2),
        "gradient sums": (model.config, "finalize_model_grads_func", 1),
        "optimizer": (step.optimizer, "step", 1),
    }[part]
    monkeypatch.setattr(holder, name, clock.slow(getattr(holder, name)))
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    run(step, pattern, tmp_path, (1, 1), 1)
    found = json.loads((tmp_path / "profile_1_1.json").read_text())["seconds"]
    assert found == dict.fromkeys(PARTS, 0.0) | {part: calls}


def test_backward_passes_are_charged_to_what_they_go_through(step, tmp_path):
    step, pattern = step
    model, seen = step.model.module, []
    clock = profile.StepClock(step.device)
    switch = clock.switch

    def noted(part):
        seen.append(part)
        switch(part)

    clock.switch = noted
    with profile.ExitStack() as until:
        clock.follow(step, pattern, until)
        clock.switch("other")
        step(batches([(30, 3), (20, 4)], 1), "sparse")
        clock.switch(None)
    micro_batch = ["trunk", "DSA layers", "head and loss", "DSA layers"]  # the last is the backward pass
    assert seen == ["other", *micro_batch, *micro_batch, "gradient sums", "other", "optimizer", "other", None]
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in (model, model.decoder.layers[-1], model.decoder.final_layernorm))
    assert "step" not in vars(step.optimizer)


def test_what_runs_between_steps_is_not_charged(step, tmp_path, monkeypatch):
    step, pattern = step
    model, clock = step.model.module, Clock()
    for layer in (model.decoder.layers[1], model.decoder.layers[-1]):
        monkeypatch.setattr(layer, "forward", clock.slow(layer.forward))
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    data = batches([(30, 3)], 1)
    with StepProfile((1, 2), step, pattern, tmp_path) as profiled:
        for iteration in (1, 2):
            profiled.begin(iteration)
            profiled.data_is_there()
            step(data, "sparse")
            profiled.end(iteration)
            with torch.no_grad():  # as an evaluation does
                forward_pack(model, data[0].tokens, data[0].cu_seqlens, data[0].labels)
            clock.now += 5.0  # as a save does
    found = json.loads((tmp_path / "profile_1_2.json").read_text())["seconds"]
    assert found == dict.fromkeys(PARTS, 0.0) | {"trunk": 1.0, "DSA layers": 1.0}


def test_a_full_disk_costs_the_trace_and_not_the_run(step, tmp_path, monkeypatch, capsys):
    step, pattern = step
    # torch's exporter says nothing where the disk is full: it leaves what it could write
    monkeypatch.setattr(
        torch.profiler.profile, "export_chrome_trace", lambda _, path: Path(f"{path}.tmp").write_text("half")
    )
    run(step, pattern, tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["profile_2_3.json"]
    assert f"note: {tmp_path / 'trace_2_3.json'} could not be written" in capsys.readouterr().err


class FakeTrunk:
    """A cache that keeps nothing."""

    computed = ()

    def begin_step(self, batches):
        pass

    def output(self, model, batch):
        return trunk_output(model.module, batch.tokens, packed_seq_params(batch.cu_seqlens), 3)

    def forward(self, model, taken, batch):
        return forward_pack(model, batch.tokens, batch.cu_seqlens, batch.labels, self.output(model, batch))


def test_what_the_trunk_cache_takes_is_the_trunks(step, tmp_path, monkeypatch):
    step, pattern = step
    step.trunk, step.flops, clock = FakeTrunk(), lambda *_: no_flops(None, None), Clock()
    monkeypatch.setattr(FakeTrunk, "output", clock.slow(FakeTrunk.output))
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    run(step, pattern, tmp_path, (1, 1), 1)
    found = json.loads((tmp_path / "profile_1_1.json").read_text())["seconds"]
    assert found == dict.fromkeys(PARTS, 0.0) | {"trunk": 2.0}


def test_it_writes_a_trace_and_prints_the_table(step, tmp_path, capsys):
    step, pattern = step
    run(step, pattern, tmp_path)
    found = json.loads((tmp_path / "profile_2_3.json").read_text())
    assert found["steps"] == 2 and all(value > 0 for value in found["seconds"].values())
    names = {event.get("name") for event in json.loads((tmp_path / "trace_2_3.json").read_text())["traceEvents"]}
    assert {f"step: {part}" for part in PARTS} <= names
    assert "mean of 2 steps" in (printed := capsys.readouterr().out) and "100.0%" in printed


def test_a_run_that_stops_early_reports_the_steps_it_took(step, tmp_path):
    step, pattern = step
    run(step, pattern, tmp_path, (2, 9), 3)
    assert json.loads((tmp_path / "profile_2_9.json").read_text())["steps"] == 2
    assert torch.is_grad_enabled()
