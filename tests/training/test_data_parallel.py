"""Two data-parallel ranks (gloo): the same training as one process with the same global batch."""

import json
import math

import pytest
from safetensors.torch import load_file

from megatron_patch.config import PRETRAIN
from megatron_patch.data.batch_file import read_batches
from megatron_patch.training.loop import train
from tests.distributed import RankError, Ranks
from tests.training.rank_runs import (
    FLAGS,
    FORMS,
    LAST,
    STEPS,
    follows,
    of_form,
    quiet,
    rewound,
    same_run,
    steps_of_adam,
    train_by_rank,
    train_quietly,
    train_with,
    training_states,
)
from tests.training.test_run import rows

FORMS_OF_RESUME = {
    "pretrain": ["optimizer_rank0000.safetensors"],
    "bf16, distributed optimizer": ["optimizer_rank0000.safetensors", "optimizer_rank0001.safetensors"],
}


@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_train_as_one(runs, make_settings, form):
    one, two = (runs(make_settings, form, count) for count in (1, 2))
    follows(one, two)


OTHER_LAYOUTS = {
    "two to one": ("pretrain", 2, 1, False),
    "one to two": ("pretrain", 1, 2, False),
    "two shards to one": ("distributed optimizer", 2, 1, True),
    "one to two shards": ("distributed optimizer", 1, 2, True),
    "two shards to two wholes": ("distributed optimizer", 2, 2, False),
    "one whole to two shards": ("pretrain", 1, 2, True),
}


@pytest.mark.parametrize("case", OTHER_LAYOUTS)
def test_another_layout_goes_on(runs, two_ranks, device, make_settings, tmp_path, case):
    form, saved_on, goes_on_on, shards = OTHER_LAYOUTS[case]
    whole = runs(make_settings, form, saved_on)
    save = rewound(whole, 5, tmp_path / "save")
    settings = make_settings(save, runs.data_of(PRETRAIN), **FLAGS, load=save, use_distributed_optimizer=shards)
    if goes_on_on == 1:
        train(settings, PRETRAIN, device)
    else:
        quiet(two_ranks.run(train_quietly, settings, PRETRAIN))
    follows(whole, save)
    assert steps_of_adam(save / LAST) == {STEPS}
    layout = json.loads((save / LAST / "manifest.json").read_text())["layout"]
    assert layout == {"data_parallel": goes_on_on, "distributed_optimizer": shards, "expert_parallel": 1}


@pytest.mark.parametrize("form", FORMS_OF_RESUME)
def test_the_same_ranks_go_on_bit_for_bit(runs, two_ranks, make_settings, tmp_path, form):
    whole = runs(make_settings, form, 2)
    save = rewound(whole, 5, tmp_path / "save")
    kind, flags = of_form(form)
    quiet(two_ranks.run(train_quietly, make_settings(save, runs.data_of(kind), **FLAGS | flags, load=save), kind))
    same_run(whole, save)
    files = FORMS_OF_RESUME[form]
    assert sorted(file.name for file in (save / LAST).glob("optimizer*")) == files
    manifest = json.loads((save / LAST / "manifest.json").read_text())
    assert set(manifest["files"]) == {"model.safetensors", "training.pt", *files}


def test_each_rank_holds_a_part_of_the_distributed_optimizer(runs, make_settings):
    """Else the state were saved twice, or a part of it not at all."""
    one = training_states(runs(make_settings, "distributed optimizer", 1) / LAST)
    two = training_states(runs(make_settings, "distributed optimizer", 2) / LAST)

    def moments(states: dict, part: str) -> int:
        return sum(value.numel() for name, value in states.items() if "/exp_avg/" in name and part in name)

    halves = [moments(two, f"rank{rank:04d}") for rank in (0, 1)]
    assert sum(halves) == moments(one, "") and min(halves) > 0.4 * sum(halves)


REFUSED = {
    "global batch": ({"global_batch_size": 3}, "3 is not a multiple of 1 x 2; use e.g. 2"),
    "save": ({"save": "/dev/null"}, "--save must be a directory: /dev/null is a file"),
    "base": ({"base_model": "/nonexistent"}, "give the directory that holds config.json"),
    "data": ({"data_path": "/nonexistent/x"}, "pretraining data are a prefix P"),
    "no held-out share": ({"split": "100,0"}, "--split"),
    "load": ({"load": "/nonexistent"}, "a --save directory has latest_checkpointed_iteration.txt"),
    "profile": ({"load": "run", "profile_steps": "4:5"}, "--profile-steps must lie ahead: 4 <= 10"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_once(runs, two_ranks, make_settings, tmp_path, case):
    flags, message = dict(REFUSED[case][0]), REFUSED[case][1]
    if flags.get("load") == "run":
        flags |= {"load": runs(make_settings, "pretrain", 2), "train_iters": STEPS + 1}
    save, data = flags.pop("save", tmp_path / "save"), flags.pop("data_path", runs.data_of(PRETRAIN))
    said_once(two_ranks.run(train_quietly, make_settings(save, data, **FLAGS | flags), PRETRAIN), message)
    assert not list(tmp_path.rglob("iter_*"))


def said_once(results, message: str) -> None:
    assert [code for code, _, _ in results] == [2, 2], results
    lines = [line for line in results[0][2].splitlines() if "error" in line]
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], results[0][2]
    assert results[1][1:] == ("", ""), results[1]


def test_a_mistake_that_one_rank_alone_meets(runs, two_ranks, make_settings, tiny_base, tmp_path):
    """A base, or data, that a second machine has not, or has otherwise."""
    from tests.tiny import make_tiny_base, make_tiny_tokenizer

    other = make_tiny_base(tmp_path / "other", seed=1)
    make_tiny_tokenizer(other)
    data = runs.data_of(PRETRAIN)
    good = make_settings(tmp_path / "save", data, **FLAGS)
    for changes, message in (
        ({"base_model": "/nonexistent"}, "give the directory that holds config.json"),
        ({"base_model": other}, "every rank reads the same base: the weights that rank 1 loaded"),
        ({"data_path": "/nonexistent/x"}, "pretraining data are a prefix P"),
    ):
        bad = make_settings(tmp_path / "save", changes.pop("data_path", data), **FLAGS | changes)
        said_once(two_ranks.run(train_by_rank, [good, bad], PRETRAIN), message)


@pytest.mark.parametrize("event", ["infinite loss", "infinite gradient"])
def test_a_non_finite_step_of_one_rank_is_skipped_on_all(runs, two_ranks, make_settings, tmp_path, event):
    save = tmp_path / "save"
    settings = make_settings(save, runs.data_of(PRETRAIN), **FLAGS | {"eval_interval": 0, "train_iters": 4})
    if event == "infinite gradient":  # goes on from its step to the end
        settings.steps.max_non_finite_steps = 2
    results = two_ranks.run(train_with, event, 3, settings, PRETRAIN)
    if event == "infinite loss":
        quiet(results)
        assert [row["iteration"] for row in rows(save, "skip")] == [3] and rows(save, "train")[-1]["iteration"] == 4
        assert all(tensor.isfinite().all() for tensor in load_file(save / "iter_0000004/model.safetensors").values())
    else:
        assert [code for code, _, _ in results] == [3, 3]
        assert results[0][2].count("error: loss or gradients were not finite 2 steps in a row") == 1
        assert results[1][1:] == ("", "")
        kept = [read_batches(save / f"non_finite/iter_0000004_rank{rank:04d}.safetensors")[0] for rank in (0, 1)]
        assert [[each.positions for each in of_rank] for of_rank in kept] == [[[12], [14]], [[13], [15]]]
        assert all(math.isfinite(each.loss) for of_rank in kept for each in of_rank), "the gradient was not, the loss was"


def test_a_signal_to_one_rank_stops_all_at_the_same_step(runs, two_ranks, make_settings, tmp_path):
    save = tmp_path / "save"
    settings = make_settings(save, runs.data_of(PRETRAIN), **FLAGS | {"save_interval": 0})
    results = two_ranks.run(train_with, "SIGTERM", 4, settings, PRETRAIN)
    quiet(results)
    assert "saved iteration 4 of 10" in results[0][1] and "(received SIGTERM)" in results[0][1]
    assert [item.name for item in save.glob("iter_*")] == ["iter_0000004"]


@pytest.mark.parametrize("event", ["defect", "SIGKILL"])
def test_a_rank_that_dies_ends_the_other(runs, make_settings, tmp_path, event):
    settings = make_settings(tmp_path / "save", runs.data_of(PRETRAIN), **FLAGS | {"eval_interval": 0})
    with Ranks(2, timeout=60) as pool, pytest.raises(RankError) as caught:
        pool.run(train_with, event, 2, settings, PRETRAIN)
    if event == "defect":
        assert caught.value.reports[1].rstrip().endswith("ValueError: planted")
        assert "rank 1 failed first, with ValueError: planted" in caught.value.reports[0]
    else:
        assert "ended with -9" in caught.value.reports[1]
        assert "Error: " in caught.value.reports[0] and "killed" not in caught.value.reports[0], caught.value.reports[0]
    assert not list((tmp_path / "save").glob("iter_*"))
