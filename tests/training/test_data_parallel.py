"""Two data-parallel ranks (gloo): the same training as one process with the same global batch."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megatron_patch.config import PRETRAIN, SFT
from megatron_patch.training.loop import train
from tests.distributed import RankError, Ranks
from tests.training.rank_runs import (
    equal,
    rewound,
    train_by_rank,
    train_quietly,
    train_with,
    training_states,
)
from tests.training.test_run import rows

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
}
FORMS_OF_RESUME = {
    "pretrain": ["training.pt"],
    "bf16, distributed optimizer": ["training_rank0000.pt", "training_rank0001.pt"],
}


@pytest.fixture(scope="module")
def runs(device, two_ranks, text_prefix, sft_folder, tiny_base, tmp_path_factory):
    """(form, ranks) -> the --save directory of an uninterrupted run, made once."""
    made = {}

    def run(make_settings, form: str, count: int):
        if (form, count) not in made:
            kind, flags = of_form(form)
            save = tmp_path_factory.mktemp("run") / "save"
            settings = make_settings(save, data_of(kind), **FLAGS | flags)
            if count == 1:
                assert train(settings, kind, device) == 0
            else:
                quiet(two_ranks.run(train_quietly, settings, kind))
            made[form, count] = save
        return made[form, count]

    def data_of(kind: str) -> str:
        return sft_folder if kind == SFT else text_prefix

    run.data_of = data_of
    return run


def of_form(form: str) -> tuple[str, dict]:
    """(kind of training, flags); "bf16, X" is X in bf16."""
    kind, flags = FORMS[form.removeprefix("bf16, ")]
    return kind, flags | {"bf16": form.startswith("bf16, ")}


def quiet(results: list[tuple[int, str, str]]) -> None:
    """All ended well, and rank 0 alone spoke."""
    assert [code for code, _, _ in results] == [0, 0], results
    assert "saved iteration" in results[0][1] and "ranks 2" in results[0][1]
    assert results[1][1:] == ("", "")


@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_train_as_one(runs, make_settings, form):
    one, two = (runs(make_settings, form, count) for count in (1, 2))
    a, b = rows(one, "train"), rows(two, "train")
    assert [row["iteration"] for row in b] == list(range(1, STEPS + 1))
    # The bounds that issue 6 sets; sums in another order are all that differs.
    for x, y in zip(a, b, strict=True):
        assert y["lm_loss"] == pytest.approx(x["lm_loss"], rel=1e-5)
        assert y["grad_norm"] == pytest.approx(x["grad_norm"], rel=1e-3)
        assert y["indexer_kl"] == pytest.approx(x["indexer_kl"], rel=1e-3)
        assert y["index_recall"] == pytest.approx(x["index_recall"], rel=1e-4)
        assert y["learning_rate"] == x["learning_rate"]
        assert (y["consumed_samples"], y["consumed_tokens"]) == (x["consumed_samples"], x["consumed_tokens"])
    for x, y in zip(rows(one, "eval"), rows(two, "eval"), strict=True):
        assert y["documents"] == x["documents"] > 0
        for name in ("lm_loss", "base_lm_loss", "indexer_kl", "index_recall", "lm_loss_stderr"):
            assert y[name] == pytest.approx(x[name], rel=1e-5 if "lm_loss" in name else 1e-3), name
    close(one / LAST, two / LAST)
    assert (one / "frozen.sha256").read_text() == (two / "frozen.sha256").read_text()
    for name in ("loss.png", "config.json", "latest_checkpointed_iteration.txt"):
        assert (two / name).exists()


def close(one, two) -> None:
    """Weights: apart by a small part of what they moved (Adam's steps of near-zero gradients have free signs)."""
    a, b = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert a.keys() == b.keys()
    apart = torch.cat([(a[name] - b[name]).flatten() for name in a])
    start = load_file(one.with_name("iter_0000005") / "model.safetensors")
    moved = torch.cat([(a[name] - start[name]).flatten() for name in a])
    assert apart.norm() < 2e-3 * moved.norm(), (apart.norm(), moved.norm())


@pytest.mark.parametrize(("saved_on", "goes_on_on"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on(runs, two_ranks, device, make_settings, tmp_path, saved_on, goes_on_on):
    whole = runs(make_settings, "pretrain", saved_on)
    save = rewound(whole, 5, tmp_path / "save")
    settings = make_settings(save, runs.data_of(PRETRAIN), **FLAGS, load=save)
    if goes_on_on == 1:
        train(settings, PRETRAIN, device)
    else:
        quiet(two_ranks.run(train_quietly, settings, PRETRAIN))
    a, b = rows(whole, "train"), rows(save, "train")
    for x, y in zip(a, b, strict=True):
        assert y["lm_loss"] == pytest.approx(x["lm_loss"], rel=1e-5)
        assert y["grad_norm"] == pytest.approx(x["grad_norm"], rel=1e-3)
        assert (y["iteration"], y["learning_rate"]) == (x["iteration"], x["learning_rate"])
    close(whole / LAST, save / LAST)
    assert steps_of_adam(save / LAST) == {STEPS}
    assert json.loads((save / LAST / "manifest.json").read_text())["layout"]["data_parallel"] == goes_on_on


def steps_of_adam(checkpoint) -> set[float]:
    return {float(value) for name, value in training_states(checkpoint).items() if name.endswith("/step")}


@pytest.mark.parametrize("form", FORMS_OF_RESUME)
def test_the_same_ranks_go_on_bit_for_bit(runs, two_ranks, make_settings, tmp_path, form):
    whole = runs(make_settings, form, 2)
    save = rewound(whole, 5, tmp_path / "save")
    kind, flags = of_form(form)
    quiet(two_ranks.run(train_quietly, make_settings(save, runs.data_of(kind), **FLAGS | flags, load=save), kind))
    a, b = load_file(whole / LAST / "model.safetensors"), load_file(save / LAST / "model.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    states = [training_states(each / LAST) for each in (whole, save)]
    assert states[0].keys() == states[1].keys() and all(equal(value, states[1][n]) for n, value in states[0].items())
    assert steps_of_adam(save / LAST) == {STEPS}
    files = FORMS_OF_RESUME[form]
    assert sorted(file.name for file in (save / LAST).glob("training*")) == files
    manifest = json.loads((save / LAST / "manifest.json").read_text())
    assert set(manifest["files"]) == {"model.safetensors", *files}
    names = ("iteration", "lm_loss", "indexer_kl", "grad_norm", "learning_rate", "consumed_tokens")
    assert [[row[n] for n in names] for row in rows(whole, "train")] == [[row[n] for n in names] for row in rows(save, "train")]


def test_each_rank_holds_a_part_of_the_distributed_optimizer(runs, make_settings):
    """Else the state were saved twice, or a part of it not at all."""
    one = training_states(runs(make_settings, "distributed optimizer", 1) / LAST)
    two = training_states(runs(make_settings, "distributed optimizer", 2) / LAST)

    def moments(states: dict, part: str) -> int:
        return sum(value.numel() for name, value in states.items() if name.endswith("/exp_avg") and part in name)

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


def test_other_layouts_of_the_distributed_optimizer_are_refused(runs, two_ranks, device, make_settings, tmp_path):
    sharded, plain = runs(make_settings, "distributed optimizer", 2), runs(make_settings, "pretrain", 2)
    data = runs.data_of(PRETRAIN)
    settings = make_settings(tmp_path / "x", data, **FLAGS, use_distributed_optimizer=True, load=sharded)
    with pytest.raises(ValueError, match=r"has 2, the run 1; start 2 ranks, or .*without --use-distributed-optimizer any"):
        train(settings, PRETRAIN, device)
    for load, flag in ((sharded, False), (plain, True)):
        settings = make_settings(tmp_path / "x", data, **FLAGS, use_distributed_optimizer=flag, load=load)
        said_once(two_ranks.run(train_quietly, settings, PRETRAIN), "a resumed run keeps its kind of optimizer")


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
