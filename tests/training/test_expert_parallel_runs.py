"""Whole runs with experts spread over ranks (gloo): those of one process, resumed and exported like them."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megatron_patch.checkpoint.export import export
from megatron_patch.config import PRETRAIN
from megatron_patch.training.loop import train
from tests.distributed import RankError, Ranks
from tests.training.rank_runs import (
    FLAGS,
    LAST,
    STEPS,
    choices_of,
    follows,
    of_form,
    quiet,
    rewound,
    same_run,
    steps_of_adam,
    train_quietly,
    train_with,
    whole_state,
)

EP = {"expert_model_parallel_size": 2}


@pytest.fixture(scope="module")
def four_ranks():
    with Ranks(4) as pool:
        yield pool


@pytest.mark.parametrize("form", ["pretrain", "sft", "distributed optimizer"])
def test_spread_experts_train_as_one_process(runs, make_settings, form):
    one, two = runs(make_settings, form, 1), runs(make_settings, form, 2, **EP)
    follows(one, two)
    a, b = whole_state(one / LAST), whole_state(two / LAST)
    assert a.keys() == b.keys() and steps_of_adam(two / LAST) == {STEPS}
    apart = torch.cat([(a[name] - b[name]).flatten() for name in a if name.startswith("exp_avg ")])
    assert apart.norm() < 2e-3 * torch.cat([a[name].flatten() for name in a if name.startswith("exp_avg ")]).norm()
    layout = json.loads((two / LAST / "manifest.json").read_text())["layout"]
    assert layout["expert_parallel"] == layout["data_parallel"] == 2


def test_no_route_and_no_index_flips(two_ranks, device, text_prefix, make_settings, tmp_path):
    """Every choice of every router and indexer in ten steps: those of one process, so that losses may be compared at 1e-5."""
    flags = FLAGS | {"eval_interval": 0, "save_interval": 0}
    one = choices_of(make_settings(tmp_path / "one", text_prefix, **flags), PRETRAIN)
    two = two_ranks.run(choices_of, make_settings(tmp_path / "two", text_prefix, **flags | EP), PRETRAIN)
    for what, a_micro_batch in (("routes", 4), ("indices", 2)):
        alone, spread = one[what], [rank[what] for rank in two]
        assert len(alone) == 2 * len(spread[0]) == STEPS * 4 * a_micro_batch
        flips = total = 0
        for number, choice in enumerate(alone):
            micro_batch, layer = divmod(number, a_micro_batch)
            other = spread[micro_batch % 2][micro_batch // 2 * a_micro_batch + layer]
            assert choice.shape == other.shape
            flips, total = flips + int((choice != other).sum()), total + choice.numel()
        assert flips == 0 and total > 1000, f"{flips} of {total} {what}"


def test_sums_of_squares_count_each_expert_once(runs, make_settings):
    """A norm that missed the other rank's experts, or counted dense weights twice, would clip wrongly, without a word."""
    one, two = runs(make_settings, "pretrain", 1), runs(make_settings, "pretrain", 2, **EP)
    norms = [
        [json.loads(line)["grad_norm"] for line in (save / "metrics.jsonl").read_text().splitlines() if '"train"' in line]
        for save in (one, two)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.parametrize("form", ["pretrain", "bf16, distributed optimizer"])
def test_the_same_layout_goes_on_bit_for_bit(runs, two_ranks, make_settings, tmp_path, form):
    whole = runs(make_settings, form, 2, **EP)
    save = rewound(whole, 5, tmp_path / "save")
    kind, flags = of_form(form)
    quiet(two_ranks.run(train_quietly, make_settings(save, runs.data_of(kind), **FLAGS | flags | EP, load=save), kind))
    same_run(whole, save)


OTHER_LAYOUTS = {  # saved as, goes on as: (ranks, expert-parallel ranks, distributed optimizer)
    "EP2 to one process": ((2, 2, False), (1, 1, False)),
    "one process to EP2": ((1, 1, False), (2, 2, False)),
    "EP2 to DP2": ((2, 2, False), (2, 1, False)),
    "EP2 in shards to DP2 in shards": ((2, 2, True), (2, 1, True)),
    "one process to EP2 in shards": ((1, 1, False), (2, 2, True)),
}


@pytest.mark.parametrize("case", OTHER_LAYOUTS)
def test_another_layout_goes_on(runs, two_ranks, device, make_settings, tmp_path, case):
    (count, ep, shards), (next_count, next_ep, next_shards) = OTHER_LAYOUTS[case]
    form = "distributed optimizer" if shards else "pretrain"
    whole = runs(make_settings, form, count, **(EP if ep == 2 else {}))
    save = rewound(whole, 5, tmp_path / "save")
    flags = FLAGS | {"expert_model_parallel_size": next_ep, "use_distributed_optimizer": next_shards, "load": save}
    settings = make_settings(save, runs.data_of(PRETRAIN), **flags)
    if next_count == 1:
        train(settings, PRETRAIN, device)
    else:
        quiet(two_ranks.run(train_quietly, settings, PRETRAIN))
    follows(whole, save)
    assert steps_of_adam(save / LAST) == {STEPS}


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ("frozen expert moves", "a frozen parameter or buffer moved"),
        ("trained weight moves", "ranks 0 and 1 must hold the same weights: they differ in decoder.layers.3.self_attention.indexer.wk"),
    ],
)
def test_what_parts_on_one_rank_is_not_saved(runs, two_ranks, make_settings, tmp_path, event, message):
    settings = make_settings(tmp_path / "save", runs.data_of(PRETRAIN), **FLAGS | EP | {"train_iters": 3, "eval_interval": 0})
    with pytest.raises(RankError, match=message):
        two_ranks.run(train_with, event, 3, settings, PRETRAIN)
    assert not list((tmp_path / "save").glob("iter_*"))


@pytest.mark.parametrize("flag", ["recompute_dsa", "overlap_grad_reduce"])
def test_recomputed_layers_and_overlapped_sums_change_nothing(runs, two_ranks, make_settings, tmp_path, flag):
    """Recomputed layers send their tokens again; gradients of experts and of the rest are summed over other ranks."""
    settings = make_settings(tmp_path / "save", runs.data_of(PRETRAIN), **FLAGS | EP, **{flag: True})
    quiet(two_ranks.run(train_quietly, settings, PRETRAIN))
    a, b = (load_file(save / LAST / "model.safetensors") for save in (runs(make_settings, "pretrain", 2, **EP), tmp_path / "save"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_sft_and_export_take_such_a_checkpoint(runs, two_ranks, make_settings, tiny_base, sft_folder, tmp_path):
    """By the experts' global numbers: the export's tensors are the checkpoint's, and weights alone start another layout."""
    pre = runs(make_settings, "pretrain", 2, **EP)
    trained = load_file(pre / LAST / "model.safetensors")
    export(pre, tiny_base, tmp_path / "export", progress=False)
    exported = load_file(next((tmp_path / "export").glob("*dsa*.safetensors")))
    for expert in range(8):
        name = f"decoder.layers.3.mlp.experts.local_experts.{expert}.linear_fc2.weight"
        assert torch.equal(trained[name], exported[f"model.layers.3.mlp.experts.{expert}.down_proj.weight"])
    for start in (pre, tmp_path / "export"):
        save = tmp_path / f"sft_{start.name}"
        flags = {"lr": 0.0, "min_lr": 0.0, "train_iters": 1, "seq_length": 128, "pretrained_checkpoint": start}
        quiet(two_ranks.run(train_quietly, make_settings(save, sft_folder, **flags | EP), "sft"))
        found = load_file(save / "iter_0000001" / "model.safetensors")
        assert all(torch.equal(trained[name], found[name]) for name in trained)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [False, True])
def test_two_times_two_ranks(runs, four_ranks, make_settings, tmp_path, shards):
    """Each expert on two ranks of four: its gradients are summed over those, the others over all."""
    flags = FLAGS | EP | {"use_distributed_optimizer": shards}
    save = tmp_path / "save"
    quiet(four_ranks.run(train_quietly, make_settings(save, runs.data_of(PRETRAIN), **flags), PRETRAIN))
    follows(runs(make_settings, "pretrain", 1), save)
    again = rewound(save, 5, tmp_path / "again")
    quiet(four_ranks.run(train_quietly, make_settings(again, runs.data_of(PRETRAIN), **flags, load=again), PRETRAIN))
    same_run(save, again)
