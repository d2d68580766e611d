"""`--async-save`: the checkpoints are those of a run that waits, byte for byte, whatever happens while they are written."""

import os
import signal
import threading
import time

import pytest

from megatron_patch import errors
from megatron_patch.checkpoint import save as saving
from megatron_patch.checkpoint.manifest import saved_iterations
from megatron_patch.config import PRETRAIN
from megatron_patch.training import loop, setup
from megatron_patch.training.loop import train
from tests.training.rank_runs import FLAGS, LAST, of_form, quiet, same_run, train_quietly

FORMS = {
    "one process": ("pretrain", 1, {}),
    "bf16, the optimizer's state on two ranks": ("bf16, distributed optimizer", 2, {}),
    "experts on two ranks": ("pretrain", 2, {"expert_model_parallel_size": 2}),
}


def train_held(settings, kind, hold: range) -> tuple[int, str, str]:
    """A run whose writers cannot write from the first step of `hold` to its last, so that those steps follow a snapshot."""
    run_step, write, free, count = setup.TrainStep.__call__, saving.write_safetensors, threading.Event(), {"done": 0}

    def held(path, tensors):
        assert threading.current_thread() is threading.main_thread() or free.wait(60)
        return write(path, tensors)

    def step(self, batches, stage):
        result = run_step(self, batches, stage)
        count["done"] += 1
        if count["done"] == hold.stop - 1:
            assert saved_iterations(settings.output.save) == [], "a writer that waits has written"
            free.set()
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
        elif count["done"] == hold.stop:
            assert saved_iterations(settings.output.save) == [5], "what every rank had written was not published before this step"
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_safetensors", held)
        patch.setattr(setup.TrainStep, "__call__", step)
        return train_quietly(settings, kind)


@pytest.mark.parametrize("form", FORMS)
def test_the_files_are_those_of_a_run_that_waits(runs, two_ranks, device, make_settings, tmp_path, form):
    """The steps that follow a snapshot move every weight and moment, and reach nothing of it."""
    name, count, more = FORMS[form]
    kind, flags = of_form(name)
    waiting, save = runs(make_settings, name, count, **more), tmp_path / "save"
    settings = make_settings(save, runs.data_of(kind), **FLAGS | flags | more, async_save=True)
    if count == 1:
        assert train_held(settings, kind, range(6, 9))[0] == 0
    else:
        quiet(two_ranks.run(train_held, settings, kind, range(6, 9)))
    for iteration in ("iter_0000005", LAST):
        names = sorted(file.name for file in (waiting / iteration).iterdir())
        assert sorted(file.name for file in (save / iteration).iterdir()) == names
        for file in names:
            assert (save / iteration / file).read_bytes() == (waiting / iteration / file).read_bytes(), file
    assert not list(save.glob(".iter_*"))


def test_one_writer_at_a_time_and_few_kept(runs, device, make_settings, text_prefix, tmp_path, monkeypatch):
    """Saved faster than it is written: each waits for the one before, and the newest is always whole."""
    save, write, at_once = tmp_path / "save", saving.write_snapshot, []

    def slow(snapshot, directory):
        at_once.append((len(list(save.glob(".iter_*"))), saved_iterations(save)))
        time.sleep(0.1)
        return write(snapshot, directory)

    monkeypatch.setattr(saving, "write_snapshot", slow)
    flags = FLAGS | {"save_interval": 1, "keep_last": 1, "async_save": True}
    assert train(make_settings(save, text_prefix, **flags), PRETRAIN, device) == 0
    assert at_once == [(1, []), *((1, [number]) for number in range(1, 10))]
    assert saved_iterations(save) == [10]
    same_run(runs(make_settings, "pretrain", 1), save)


ENDS = {
    "a signal": (0, [2, 3]),  # the one at hand is finished, the last one written at once
    "non-finite": (3, [2]),
    "a defect": (1, []),  # the ranks may not be there any more to publish together
    "a full disk": (2, []),
}


@pytest.mark.parametrize("end", ENDS)
def test_how_a_run_ends_while_it_writes(device, make_settings, text_prefix, tmp_path, monkeypatch, capsys, end):
    code, left = ENDS[end]
    run_step, write, count = setup.TrainStep.__call__, saving.write_snapshot, {"done": 0}
    save, stopped = tmp_path / "save", threading.Event()

    def step(self, batches, stage):
        count["done"] += 1
        if count["done"] == 3:
            stopped.set()
            if end == "a signal":
                os.kill(os.getpid(), signal.SIGTERM)
            elif end == "non-finite":
                batches[0].loss_mask[0] = float("inf")
            elif end == "a defect":
                raise ValueError("planted")
        return run_step(self, batches, stage)

    def slow(snapshot, directory):
        if threading.current_thread() is not threading.main_thread():
            assert stopped.wait(60)
            time.sleep(0.3)
            if end == "a full disk":
                raise OSError(28, "No space left on device")
        return write(snapshot, directory)

    monkeypatch.setattr(setup.TrainStep, "__call__", step)
    monkeypatch.setattr(saving, "write_snapshot", slow)
    settings = make_settings(save, text_prefix, save_interval=2, async_save=True, max_non_finite_steps=1)
    if code == 1:
        with pytest.raises(ValueError, match="planted"):
            train(settings, PRETRAIN, device)
    else:
        assert errors.run(lambda: train(settings, PRETRAIN, device)) == code
    assert ("No space left on device" in capsys.readouterr().err) == (end == "a full disk")
    assert saved_iterations(save) == left and not list(save.glob(".iter_*"))
    assert "checkpoint" not in [thread.name for thread in threading.enumerate()], "a writer was left behind"


def test_a_base_that_moved_is_not_published(device, make_settings, text_prefix, tmp_path):
    """The writer looks, since the base's hash takes longer than what trains takes to write."""
    run = setup.set_up(make_settings(tmp_path / "run", text_prefix, async_save=True), PRETRAIN, device)
    run.model.decoder.layers[0].mlp.linear_fc1.weight.data[0, 0] += 1e-3
    loop._save(run, background=True)
    with pytest.raises(RuntimeError, match="a frozen parameter or buffer moved"):
        run.saver.finish()
    assert not list((tmp_path / "run").glob("*iter_*"))
    run.metrics.close()
