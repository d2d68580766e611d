"""Nothing but the steps since the last whole checkpoint is ever lost: kills, torn files, full disks."""

import json
import os
import resource
import shutil
import signal
import time

import pytest
from safetensors.torch import load_file

from megatron_patch import errors
from megatron_patch.checkpoint import save as saving
from megatron_patch.checkpoint.resume import choose_checkpoint, resumable_iterations
from megatron_patch.config import PRETRAIN
from megatron_patch.errors import UserError
from megatron_patch.training.loop import train
from tests.killable import EVENTS, Job
from tests.training.rank_runs import FLAGS, FORMS, LAST, no_space, quiet, same_run, train_quietly, train_with
from tests.training.test_run import poison, rows

FILES = ("model.safetensors", "optimizer_rank0000.safetensors", "training.pt", "manifest.json")


@pytest.fixture
def saved(runs, make_settings, tmp_path):
    """A copy of a finished run with checkpoints at 5 and 10."""
    return shutil.copytree(runs(make_settings, "pretrain", 1), tmp_path / "copy")


def truncate(file):
    os.truncate(file, file.stat().st_size - 7)


@pytest.mark.parametrize("damage", [truncate, os.unlink])
@pytest.mark.parametrize("file", FILES)
def test_a_torn_checkpoint_is_passed_over_with_a_line(saved, capsys, file, damage):
    damage(saved / LAST / file)
    directory, manifest = choose_checkpoint(saved, whole_state=True)
    assert directory.name == "iter_0000005" and manifest.iteration == 5
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: {saved / LAST} is passed over, and {directory} used: ") and file in line
    damage(directory / file)
    with pytest.raises(UserError, match=LAST):
        choose_checkpoint(saved, whole_state=True)


def test_what_is_no_checkpoint_of_its_number_is_passed_over(saved, capsys):
    shutil.copytree(saved / LAST, saved / "iter_0000020")
    (saved / "iter_0000030").write_text("a file")
    (saved / "latest_checkpointed_iteration.txt").write_text("30")
    assert choose_checkpoint(saved, whole_state=True)[0].name == LAST
    assert "iter_0000020 is of iteration 10" in capsys.readouterr().err


def test_weights_alone_need_no_optimizer(saved):
    truncate(saved / LAST / "optimizer_rank0000.safetensors")
    assert choose_checkpoint(saved, whole_state=False)[0].name == LAST


LOST_STATES = {
    "empty file": lambda name: False,
    "no file": None,
    "AdamW's steps": lambda name: not name.startswith("step/"),
    "one parameter": lambda name: "wk.weight" not in name,
}


@pytest.mark.parametrize("lost", LOST_STATES)
def test_an_optimizer_that_has_stepped_is_not_begun_anew(saved, device, make_settings, text_prefix, lost):
    """The files are as the manifest says, and hold less than the optimizer had: a tool's work, or an older fault's."""
    checkpoint, kept = saved / LAST, LOST_STATES[lost]
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    file = checkpoint / "optimizer_rank0000.safetensors"
    if kept is None:
        file.unlink()
        del manifest["files"][file.name]
    else:
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items() if kept(name)}
        manifest["files"][file.name] = saving.write_safetensors(file, tensors)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    settings = make_settings(saved, text_prefix, **FLAGS, load=saved)
    with pytest.raises(UserError, match=rf"an optimizer's state covers what trains: {checkpoint} has .*, AdamW needs exp_avg, "):
        train(settings, PRETRAIN, device)


def test_an_optimizer_that_never_stepped_has_no_state(device, make_settings, text_prefix, tmp_path, monkeypatch):
    save = tmp_path / "save"
    with monkeypatch.context() as patch:
        poison(patch, {1, 2})
        assert train(make_settings(save, text_prefix, train_iters=2), PRETRAIN, device) == 0
    assert not list(save.rglob("optimizer*"))
    assert train(make_settings(save, text_prefix, train_iters=3, load=save), PRETRAIN, device) == 0
    assert list(save.rglob("optimizer*"))


def test_what_the_pointer_says(saved):
    pointer = saved / "latest_checkpointed_iteration.txt"
    pointer.write_text("5")
    assert resumable_iterations(saved) == [5], "a later one is of a run that was taken back"
    for content in ("", None):  # torn, or killed between publishing the first checkpoint and writing it
        pointer.unlink() if content is None else pointer.write_text(content)
        assert resumable_iterations(saved) == [10, 5]


def test_a_run_goes_on_from_the_one_before(runs, device, make_settings, saved, text_prefix, capsys):
    """Also where few are kept: the torn one must not count as the newest, or the whole ones would go."""
    truncate(saved / LAST / "model.safetensors")
    shutil.copytree(saved / LAST, saved / "iter_0000020")  # of a run that was taken back
    settings = make_settings(saved, text_prefix, **FLAGS | {"save_interval": 1, "keep_last": 2, "load": saved})
    assert train(settings, PRETRAIN, device) == 0
    assert "iter_0000010 is passed over" in capsys.readouterr().err
    same_run(runs(make_settings, "pretrain", 1), saved)
    assert [path.name for path in sorted(saved.glob("iter_*"))] == ["iter_0000009", LAST, "iter_0000020"]


@pytest.mark.parametrize(
    ("event", "background"), [*((event, False) for event in EVENTS), ("weights written", True), ("old one half removed", True)]
)
def test_killed_while_it_saves(runs, make_settings, text_prefix, tmp_path, capsys, event, background):
    """-9 at each step of publishing the second checkpoint; the run goes on, and nothing is left of the half one."""
    save, log = tmp_path / "save", tmp_path / "log"
    flags = FLAGS | {"save_interval": 4, "keep_last": 1, "eval_interval": 5, "async_save": background}
    with Job(make_settings(save, text_prefix, **flags), PRETRAIN, 1, log, kill_at=event) as job:
        assert job.wait(120) == [-9], log.read_text()
    survivor = 8 if event in ("published", "old one half removed") else 4
    # Published is published: the pointer, written later, may name the one before, and that one is whole then.
    expected = 4 if event == "published" else survivor
    assert choose_checkpoint(save, whole_state=True)[1].iteration == expected
    with Job(make_settings(save, text_prefix, **flags, load=save), PRETRAIN, 1, log) as job:
        assert job.wait(120) == [0], log.read_text()
    names = ("iteration", "lm_loss", "grad_norm")
    whole = rows(runs(make_settings, "pretrain", 1), "train")
    assert [[row[n] for n in names] for row in rows(save, "train")] == [[row[n] for n in names] for row in whole]
    assert not list(save.glob(".iter_*"))


def test_a_rank_that_hangs_ends_the_others_in_time(make_settings, text_prefix, tmp_path):
    """--distributed-timeout-minutes: not sooner (a rank may be slow), and not never."""
    save, log, minutes = tmp_path / "save", tmp_path / "log", 0.1
    flags = FLAGS | {"train_iters": 5000, "eval_interval": 0, "distributed_timeout_minutes": minutes, "log_interval": 1}
    with Job(make_settings(save, text_prefix, **flags), PRETRAIN, 2, log) as job:
        until = time.monotonic() + 120
        while not (save / "metrics.jsonl").exists() or not (save / "metrics.jsonl").read_text():
            assert job.running and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        job.send(signal.SIGSTOP, 1)
        stopped = time.monotonic()
        job.processes[0].join(60)
        assert job.processes[0].exitcode == 1, log.read_text()[-2000:]
        assert 60 * minutes - 1 < time.monotonic() - stopped < 60
    assert "imed out" in log.read_text()


def test_a_full_disk_is_one_line(device, make_settings, saved, text_prefix, monkeypatch, capsys):
    """While the weights, or torch's own file, are written; the checkpoint before stays, and is gone on from."""
    flags = FLAGS | {"train_iters": 12, "save_interval": 1, "load": saved}
    settings, in_background = (make_settings(saved, text_prefix, **flags, async_save=background) for background in (False, True))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (saved / LAST / "optimizer_rank0000.safetensors").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1000, hard))  # the system refuses the file's last kilobyte
    try:
        assert errors.run(lambda: train(settings, PRETRAIN, device)) == 2
        assert errors.run(lambda: train(in_background, PRETRAIN, device)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    line = "error: the output needs space that can be written: {}: File too large; free some, or give another path"
    assert said == [line.format(saved / "iter_0000011")] * 2
    for place in ("write_safetensors", "torch.save"):
        with monkeypatch.context() as patch:
            patch.setattr(saving, place, no_space) if "." not in place else patch.setattr(saving.torch, "save", no_space)
            assert errors.run(lambda: train(settings, PRETRAIN, device)) == 2
        assert "No space left on device" in capsys.readouterr().err
    assert not list(saved.glob(".iter_*")) and choose_checkpoint(saved, whole_state=True)[0].name == LAST
    assert train(settings, PRETRAIN, device) == 0


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "async"])
def test_a_full_disk_of_one_rank_is_said_once(two_ranks, make_settings, text_prefix, tmp_path, background):
    flags = FLAGS | FORMS["distributed optimizer"][1] | {"eval_interval": 0, "save_interval": 2, "train_iters": 4}
    flags |= {"async_save": background}
    save = tmp_path / "save"
    quiet(two_ranks.run(train_quietly, make_settings(save, text_prefix, **flags), PRETRAIN))
    settings = make_settings(save, text_prefix, **flags | {"train_iters": 8}, load=save)  # the last save waits in either form
    results = two_ranks.run(train_with, "disk full", 1, settings, PRETRAIN)
    assert [code for code, _, _ in results] == [2, 2], results
    assert results[0][2].count("error: the output needs space") == 1 and results[1][1:] == ("", "")
    assert choose_checkpoint(save, whole_state=True)[1].iteration == 4 and not list(save.glob(".iter_*"))
    assert load_file(save / "iter_0000004" / "model.safetensors")
