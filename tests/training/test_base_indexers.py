"""`--train base-indexers`, whole runs: the base stays, the indexers find the attention, and the native export takes them."""

import json
import random
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_patch.checkpoint.check import check
from megatron_patch.checkpoint.export import export
from megatron_patch.config import PRETRAIN, SFT
from megatron_patch.errors import UserError
from megatron_patch.io.hashes import directory_identity
from megatron_patch.training.base_recall import recalled_mass
from megatron_patch.training.loop import train
from megatron_patch.training.metrics import read_metrics
from tests.checkpoint.models import DSA
from tests.checkpoint.oracle import tensors_of
from tests.checkpoint.runs import write_run
from tests.training.conftest import WORDS
from tests.training.rank_runs import train_quietly

SIZES = {"index_topk": DSA.index_topk, "index_n_heads": DSA.index_n_heads, "index_head_dim": DSA.index_head_dim}
INDEXERS = {"train": "base-indexers", **SIZES, "isolate_documents": False}


@pytest.fixture(scope="module")
def trained(device, tiny_base, text_prefix, make_settings, tmp_path_factory):
    """A --save directory whose indexers have learned at top-k = tokens / 4."""
    save = tmp_path_factory.mktemp("indexers") / "run"
    flags = {"train_iters": 120, "global_batch_size": 8, "micro_batch_size": 8, "lr": 2e-2, "min_lr": 1e-3, "lr_warmup_iters": 10}
    assert train(make_settings(save, text_prefix, **INDEXERS, **flags, eval_interval=120, log_interval=20), PRETRAIN, device) == 0
    return save


def test_recall_closes_most_of_the_gap(trained):
    """To the oracle from the better of random and recent; the untrained indexers' share shows that it was learned."""
    report = json.loads((trained / "base_indexers.json").read_text())
    assert report["schema"] == 1 and report["iteration"] == 120 and report["index_topk"] == 16 and report["queries"] > 300
    assert [row["layer"] for row in report["layers"]] == [0, 1, 2]
    for row in report["layers"]:
        assert max(row["random"], row["recent"]) < row["indexer"] < row["oracle"]
    mean = report["mean"]
    best = max(mean["random"], mean["recent"])
    assert mean["gap_closed"] == pytest.approx((mean["indexer"] - best) / (mean["oracle"] - best))
    assert mean["gap_closed"] >= 0.8


def test_the_checkpoint_holds_the_indexers_alone(trained, tiny_base):
    manifest = json.loads((trained / "iter_0000120" / "manifest.json").read_text())
    assert manifest["kind"] == "base-indexers" and manifest["layer_pattern"] == ["mla"] * 3
    assert manifest["base"]["sha256"] == directory_identity(tiny_base)
    names = set(load_file(trained / "iter_0000120" / "model.safetensors"))
    leaves = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
    assert names == {f"decoder.layers.{i}.self_attention.indexer.{leaf}" for i in range(3) for leaf in leaves}


def test_metrics_say_dense_and_the_loss_is_the_bases(trained):
    rows = read_metrics(trained)
    assert {row["stage"] for row in rows} == {"dense"}
    first, last = [row for row in rows if row["kind"] == "eval"]
    assert first["lm_loss"] == last["lm_loss"] == first["base_lm_loss"]  # bit for bit: nothing of the base moved
    assert last["indexer_kl"] < 0.5 * first["indexer_kl"] and last["index_recall"] > first["index_recall"]


def test_a_resumed_run_is_the_uninterrupted_one(device, make_settings, text_prefix, tmp_path):
    flags = INDEXERS | {"save_interval": 3}
    train(make_settings(tmp_path / "whole", text_prefix, **flags), PRETRAIN, device)
    train(make_settings(tmp_path / "half", text_prefix, **(flags | {"train_iters": 3}), lr_decay_style="constant"), PRETRAIN, device)
    for name in ("whole", "half"):
        assert (tmp_path / name / "iter_0000003").is_dir()
    train(make_settings(tmp_path / "on", text_prefix, **flags, load=tmp_path / "whole"), PRETRAIN, device)
    one, two = (load_file(tmp_path / name / "iter_0000006" / "model.safetensors") for name in ("whole", "on"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_recalled_mass_against_loops():
    """Each of the four selections, written out query by query; padding and short rows left out."""
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(50, 2, 6, generator=generator) for _ in range(2))
    index_query, index_key = torch.randn(50, 3, 4, generator=generator), torch.randn(50, 4, generator=generator)
    weights = torch.rand(50, 3, generator=generator)
    counted = torch.rand(50, generator=generator) > 0.2
    cu, topk, expected = torch.tensor([0, 21, 25, 50]), 5, torch.zeros(5, dtype=torch.float64)

    class Index:
        query, key, weights = index_query, index_key, None

    Index.weights = weights
    for begin, end in pairwise(cu.tolist()):
        for t in range(begin, end):
            n = t - begin + 1
            if n <= topk or not counted[t]:
                continue
            mass = torch.stack([(query[t, h] @ key[begin : t + 1, h].T * 0.3).softmax(-1) for h in range(2)]).mean(0)
            score = sum(weights[t, j] * (index_query[t, j] @ index_key[begin : t + 1].T).relu() for j in range(3))
            order = sorted(range(n), key=lambda s: (-float(score[s]), -s))
            found = [mass[order[:topk]].sum(), topk / n, mass[-topk:].sum(), mass.sort(descending=True).values[:topk].sum(), 1]
            expected += torch.tensor([float(x) for x in found], dtype=torch.float64)
    got = recalled_mass(query, key, Index, cu, 0.3, topk, counted)
    assert got[4] == expected[4] > 20
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def exports(trained, tiny_base, tmp_path_factory):
    """(hybrid, native with the trained indexers, native with neutral ones) of one model."""
    path = tmp_path_factory.mktemp("native")
    save = write_run(path / "save", tiny_base)
    export(save, tiny_base, path / "hybrid", progress=False)
    export(save, tiny_base, path / "trained", layout="native", base_indexers=trained, progress=False)
    export(save, tiny_base, path / "neutral", layout="native", progress=False)
    return path / "hybrid", path / "trained", path / "neutral"


def test_native_export_holds_them(exports, trained, tiny_base):
    state, saved = tensors_of(exports[1]), load_file(trained / "iter_0000120" / "model.safetensors")
    for name, tensor in saved.items():
        assert torch.equal(state[name.replace("decoder", "model").replace("self_attention", "self_attn")], tensor)
    record = json.loads((exports[1] / "upcycle_manifest.json").read_text())["native"]
    assert record["context"] == "any" and record["base_indexers"]["kind"] == "trained"
    assert record["base_indexers"]["iteration"] == 120
    readme = (exports[1] / "README.md").read_text()
    assert "trained on this base's own attention (iteration 120" in readme and "Context <= index_topk" not in readme
    assert check(exports[1], tiny_base) == 0


@torch.no_grad()
def test_trained_indexers_keep_the_predictions_beyond_topk(exports, tiny_base):
    """At 4 x top-k, on text like that they saw, the native layout predicts as the hybrid does, better than with neutral indexers."""
    random.seed(8)
    text = [" ".join(random.choices(WORDS, k=40)) for _ in range(8)]
    ids = AutoTokenizer.from_pretrained(tiny_base)(text, return_tensors="pt", padding=True)["input_ids"][:, : 4 * DSA.index_topk]
    hybrid, found, neutral = (
        AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype=torch.float32).eval()(ids).logits.log_softmax(-1)
        for path in exports
    )

    def divergence(other: torch.Tensor) -> float:
        return float((hybrid.exp() * (hybrid - other)).sum(-1).mean())

    assert divergence(found) < 0.7 * divergence(neutral)  # a random base attends widely: some is lost to any selection


def test_nothing_else_is_taken_for_base_indexers(device, trained, tiny_base, make_settings, text_prefix, tmp_path):
    dsa = write_run(tmp_path / "dsa", tiny_base)
    export(dsa, tiny_base, tmp_path / "export", progress=False)
    refusals = [
        (lambda: export(trained, tiny_base, tmp_path / "x"), "--checkpoint holds trained DSA layers: .* holds the base's indexers"),
        (
            lambda: export(dsa, tiny_base, tmp_path / "x", layout="native", base_indexers=dsa),
            r"--base-indexers is a run of --train base-indexers: .* trained DSA layers \(pretrain\)",
        ),
        (lambda: export(dsa, tiny_base, tmp_path / "x", base_indexers=trained), "--base-indexers belong to the native layout"),
    ]
    for start, flags, message in (
        (trained, {}, "train apart: .* has base-indexers, the run trains DSA layers"),
        (dsa, INDEXERS, "train apart: .* has DSA layers, the run trains base-indexers"),
        (tmp_path / "export", INDEXERS, "start from nothing or from a run of their own: .* is an export"),
    ):
        settings = make_settings(tmp_path / "new", text_prefix, **(SIZES | flags), pretrained_checkpoint=start)
        refusals.append((lambda settings=settings: train(settings, PRETRAIN, device), message))
    settings = make_settings(tmp_path / "new", text_prefix, **INDEXERS)
    refusals.append((lambda: train(settings, SFT, device), "base indexers learn from text"))
    for call, message in refusals:
        with pytest.raises(UserError, match=message):
            call()
    other = write_run(tmp_path / "other", tiny_base, dsa=DSA.__class__(16, 4, 16), change=_more_heads)
    with pytest.raises(UserError, match=r"have one --index-n-heads: .* has 3, --checkpoint 4"):
        export(other, tiny_base, tmp_path / "x", layout="native", base_indexers=trained)


def _more_heads(tensors: dict) -> None:
    for name, rows in (("wq_b.weight", 64), ("weights_proj.weight", 4)):
        for full in [full for full in tensors if full.endswith(f"indexer.{name}")]:
            tensors[full] = torch.zeros(rows, 64)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"layer_pattern": "mla*3"}, "builds the base alone, without --layer-pattern"),
        ({"optimizer": "muon"}, "needs --optimizer adam or sgd, muon takes no indexers"),
        ({"recompute_dsa": True}, "--recompute-dsa needs DSA layers"),
    ],
)
def test_flags_that_do_not_go_together(make_settings, text_prefix, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        make_settings(tmp_path, text_prefix, **INDEXERS, **flags)


def test_two_ranks_train_what_one_process_trains(device, two_ranks, make_settings, text_prefix, tmp_path):
    flags = INDEXERS | {"micro_batch_size": 1, "eval_interval": 3, "lr": 1e-3, "optimizer": "sgd"}
    train(make_settings(tmp_path / "one", text_prefix, **flags), PRETRAIN, device)
    results = two_ranks.run(train_quietly, make_settings(tmp_path / "two", text_prefix, **flags), PRETRAIN)
    assert [code for code, _, _ in results] == [0, 0], results
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        for name in ("indexer_kl", "index_recall", "grad_norm"):
            assert a[name] == (None if b[name] is None else pytest.approx(b[name], rel=1e-4)), (a, b)
    recalls = [json.loads((tmp_path / name / "base_indexers.json").read_text()) for name in ("one", "two")]
    assert recalls[0]["queries"] == recalls[1]["queries"] > 0
    for name in ("indexer", "random", "recent", "oracle"):
        assert recalls[0]["mean"][name] == pytest.approx(recalls[1]["mean"][name], rel=1e-4)
