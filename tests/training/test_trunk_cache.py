"""--trunk-cache: the same training, without the trunk's layers for rows that were met before."""

import re
import signal
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from safetensors.torch import load_file

from megatron_patch import errors
from megatron_patch.config import PRETRAIN, SFT
from megatron_patch.data import row_store
from megatron_patch.errors import UserError
from megatron_patch.training.loop import train
from tests.killable import Job
from tests.tiny import make_tiny_base, make_tiny_tokenizer
from tests.training.rank_runs import quiet, train_quietly
from tests.training.test_run import rows, stop_after

TRUNK = 3  # layers of the tiny base
STEPS, BATCH = 8, 2
FLAGS = {
    "micro_batch_size": 1, "global_batch_size": BATCH, "seq_length": 256, "dsa_init": "copy", "eval_interval": 4, "train_iters": STEPS,
    "split": "50,50",
}  # fmt: skip
NUMBERS = ("lm_loss", "indexer_kl", "grad_norm", "consumed_tokens")
FORMS = {
    "pretrain": (PRETRAIN, {"epoch_rows": "same", "trunk_cache_dtype": "fp32"}),
    "sft, bf16": (SFT, {"bf16": True, "recompute_dsa": True}),
}


@pytest.fixture
def run(device, make_settings, text_prefix, sft_folder, tmp_path):
    """(name, kind, flags) -> the finished run's directory; `run.settings` gives the settings alone."""

    def settings(name, kind=PRETRAIN, **flags):
        data = sft_folder if kind == SFT else text_prefix
        split = {"split": "20,80"} if kind == SFT else {}  # 12 of 60 chats, 9 rows of text: more than one epoch
        return make_settings(tmp_path / name, data, **FLAGS | split | flags)

    def run(name, kind=PRETRAIN, **flags):
        assert train(settings(name, kind, **flags), kind, device) == 0
        return tmp_path / name

    run.settings, run.cache = settings, tmp_path / "cache"
    return run


def same(one, other, numbers=NUMBERS) -> None:
    """Losses of every step, held-out losses and weights, bit for bit."""
    a, b = ([[row[n] for n in numbers] for row in rows(save, "train")] for save in (one, other))
    assert a == b
    a, b = ([(row["lm_loss"], row["base_lm_loss"], row["indexer_kl"]) for row in rows(save, "eval")] for save in (one, other))
    assert a == b and len(a) >= 2
    a, b = (load_file(sorted(save.glob("iter_*"))[-1] / "model.safetensors") for save in (one, other))
    assert all(torch.equal(a[name], b[name]) for name in a)


def cached(save) -> list[float]:
    return [row["trunk_cached"] for row in rows(save, "train")]


def losses(save) -> list[float]:
    return [row["lm_loss"] for row in rows(save, "train")]


@pytest.fixture
def trunk_layers(monkeypatch):
    """How often a layer of the trunk has run in training, in its single item."""
    count, forward = [0], TransformerLayer.forward

    def counted(self, *args, **kwargs):
        count[0] += self.layer_number <= TRUNK and not (torch.is_grad_enabled() is False and not self.training)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(TransformerLayer, "forward", counted)
    return count


@pytest.mark.parametrize("form", FORMS)
def test_without_with_an_empty_and_with_a_full_cache(run, trunk_layers, form):
    """Where the kept values are in the dtype of the computation, the cache changes no bit; and met rows cost no layer."""
    kind, flags = FORMS[form]
    without = run("without", kind, **flags)
    assert cached(without) == [None] * STEPS and trunk_layers[0] == STEPS * BATCH * TRUNK
    trunk_layers[0] = 0
    cold = run("cold", kind, **flags, trunk_cache=run.cache)
    met = filled(run.cache)
    assert BATCH < met <= STEPS * BATCH - 4 and trunk_layers[0] == met * TRUNK, "every row once"
    assert cached(cold)[0] == 0 and cached(cold)[-1] == 1
    trunk_layers[0] = 0
    warm = run("warm", kind, **flags, trunk_cache=run.cache)
    assert trunk_layers[0] == 0 and cached(warm) == [1.0] * STEPS
    same(without, cold)
    same(without, warm)
    tflops = [rows(save, "train")[-1]["tflops_per_device"] * rows(save, "train")[-1]["step_seconds"] for save in (without, warm)]
    assert tflops[1] < 0.9 * tflops[0], "FLOPs that were not computed are not counted"


def test_who_fills_it_does_not_matter(run, capsys):
    """Another order, other micro-batches, fewer steps, bf16 values in an fp32 run: each run is as on an empty cache."""
    run("filler", seed=7, micro_batch_size=2, train_iters=2, trunk_cache=run.cache)
    met = filled(run.cache)
    with open(run.cache / "values.bin", "r+b") as file:  # as a power cut can leave it: the record is there, the values are not
        file.write(b"\0" * (run.cache / "values.bin").stat().st_size)
    capsys.readouterr()
    on_damaged = run("on damaged", trunk_cache=run.cache)
    assert capsys.readouterr().out.count("is damaged, as a loss of power leaves it, and is computed again") == 1
    assert met == 2 * BATCH and cached(on_damaged)[0] == 0
    on_filled = run("on filled", trunk_cache=run.cache)
    assert cached(on_filled) == [1.0] * STEPS
    same(on_damaged, on_filled)
    without = run("without", epoch_rows="same")  # in fp32 all the way
    assert losses(without) == pytest.approx(losses(on_filled), rel=2e-3) and losses(without) != losses(on_filled)


def test_rows_that_share_a_micro_batch(run):
    """The trunk takes them one by one, so that its sums differ from those of a whole micro-batch, in their last digits."""
    flags = {"micro_batch_size": 2, "train_iters": 4, "epoch_rows": "same", "trunk_cache_dtype": "fp32"}
    assert losses(run("with", **flags, trunk_cache=run.cache)) == pytest.approx(losses(run("without", **flags)), rel=1e-5)


def test_chats_of_another_split_find_theirs(run):
    run("one", SFT, train_iters=6, eval_interval=0, trunk_cache=run.cache)
    assert max(cached(run("other", SFT, train_iters=8, trunk_cache=run.cache, split="50,50", seq_length=120))) > 0


def test_a_resumed_run(run, device):
    """It goes on as the uninterrupted one, and may take up the cache on the way."""
    whole = run("whole", trunk_cache=run.cache, trunk_cache_dtype="fp32")
    other = {"trunk_cache": run.cache.with_name("other")}
    for name, first, then in (("with", other, other), ("taken up", {"epoch_rows": "same"}, {"trunk_cache": run.cache})):
        settings = run.settings(name, save_interval=1, trunk_cache_dtype="fp32", **first)
        stop_after(settings, 5, PRETRAIN, device)
        same(whole, run(name, load=settings.output.save, trunk_cache_dtype="fp32", **then))
    with pytest.raises(UserError, match=r"a resumed run keeps its --epoch-rows: .* has same, the command line fresh"):
        run("taken up", load=settings.output.save, train_iters=STEPS + 1)


def test_a_run_killed_while_it_fills(run):
    flags = {"seq_length": 64, "split": "80,20"}  # 32 different rows
    reference = run("reference", **flags, trunk_cache=run.cache.with_name("other"))
    with Job(run.settings("killed", **flags, trunk_cache=run.cache), PRETRAIN, 1, run.cache.with_name("log")) as job:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and filled(run.cache) < 3:
            time.sleep(0.002)
        job.send(signal.SIGKILL, 0)
        assert job.wait(10) == [-signal.SIGKILL]
    assert 3 <= filled(run.cache) < filled(run.cache.with_name("other")) == STEPS * BATCH
    after = run("after", **flags, trunk_cache=run.cache)
    same(reference, after)
    assert sum(cached(after)) > sum(cached(reference))


def filled(cache) -> int:
    file = cache / "rows.bin"
    return int((np.fromfile(file, "<u8")[::2] != 0).sum()) if file.exists() else 0


def test_two_ranks_fill_one_cache(run, two_ranks):
    """Each its own rows, with the values that one rank would have kept."""
    flags = {"train_iters": 4, "trunk_cache": run.cache}
    for name in ("cold", "warm"):
        quiet(two_ranks.run(train_quietly, run.settings(f"two {name}", **flags), PRETRAIN))
    cold, warm = (run.settings(f"two {name}").output.save for name in ("cold", "warm"))
    same(cold, warm)
    assert cached(warm) == [1.0] * 4 and cached(cold)[0] == 0
    run("one", **flags | {"trunk_cache": run.cache.with_name("other")})
    for file in ("values.bin", "rows.bin", "manifest.json"):
        assert (run.cache / file).read_bytes() == (run.cache.with_name("other") / file).read_bytes(), file


def test_two_ranks_with_half_of_the_experts_each(run, two_ranks):
    """They run the trunk together: a rank that misses no row runs it for the other's sake, and nobody waits for ever."""
    flags = {"expert_model_parallel_size": 2, "train_iters": 4, "trunk_cache": run.cache}
    run("filler", train_iters=1, seed=7, trunk_cache=run.cache)  # so that one rank has a row and the other has not
    quiet(two_ranks.run(train_quietly, run.settings("cold", **flags), PRETRAIN))
    quiet(two_ranks.run(train_quietly, run.settings("warm", **flags), PRETRAIN))
    same(*(run.settings(name).output.save for name in ("cold", "warm")))
    assert cached(run.settings("warm").output.save) == [1.0] * 4


REFUSED = {
    "rows cut anew": ({"epoch_rows": "fresh"}, "--trunk-cache needs rows that come again: --epoch-rows fresh"),
    "no trunk": ({"train": "base-indexers"}, "--train base-indexers has none"),
    "precision": ({"bf16": True}, "compute is fp32 in .*, bf16 in this run; train in its precision"),
    "dtype": ({"trunk_cache_dtype": "fp32"}, "dtype is bf16 in .*, fp32 in this run; give its --trunk-cache-dtype"),
    "seq_length": ({"seq_length": 64}, "seq_length is 256 in .*, 64"),
    "documents": ({"isolate_documents": False}, "isolate_documents is True in"),
    "split": ({"split": "60,40"}, "split is 50,50 in .*, 60,40"),
    "kind": ({}, "kind is pretrain in .*, sft"),
    "base": ({}, "base_sha256 is .* in this run; use the base that it was made with"),
    "data": ({}, "data_sha256 is .* in this run; give the data that it was made from"),
}


def test_refusals(run, device, capsys, tmp_path, tiny_base, text_prefix):
    """With exit code 2, in one line, before anything trains; the cache stays as it is."""
    run("first", train_iters=1, eval_interval=0, trunk_cache=run.cache)
    before = {file.name: file.read_bytes() for file in run.cache.iterdir()}
    capsys.readouterr()
    other_base = make_tiny_base(tmp_path / "other", seed=1)
    make_tiny_tokenizer(other_base)
    for case, (flags, message) in REFUSED.items():
        kind = SFT if case == "kind" else PRETRAIN
        try:
            settings = run.settings("refused", kind, trunk_cache=run.cache, eval_interval=0, **flags)
        except UserError as error:
            assert case == "no trunk" and message in str(error)
            continue
        if case == "base":
            settings.model.base_model = other_base
        if case == "data":
            settings.data.data_path = ("0.5", text_prefix, "0.5", _copied(text_prefix, tmp_path))
        code = errors.run(lambda settings=settings, kind=kind: train(settings, kind, device))
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert code == 2 and re.search(message, line), (case, line)
    assert {file.name: file.read_bytes() for file in run.cache.iterdir()} == before
    assert not list(tmp_path.glob("refused/iter_*"))


def _copied(prefix: str, folder) -> str:
    for suffix in ("bin", "idx", "json"):
        (folder / f"again.{suffix}").write_bytes(Path(f"{prefix}.{suffix}").read_bytes())
    return str(folder / "again")


def test_a_full_disk_is_found_at_the_start(run, device, monkeypatch, capsys):
    settings = run.settings("full", trunk_cache=run.cache, eval_interval=0)
    with monkeypatch.context() as patch:
        patch.setattr(row_store.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(4096))
        assert errors.run(lambda: train(settings, PRETRAIN, device)) == 2
    out = capsys.readouterr()
    assert "tokens x 64 x 2 bytes = " in out.out and "error: the disk must hold the trunk cache" in out.err
    assert not run.cache.exists(), "it would bind the next try to this one's rows"
    run("full", trunk_cache=run.cache, eval_interval=0, train_iters=1, seq_length=64)
