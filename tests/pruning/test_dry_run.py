"""A dry run's figures are those of the checkpoint that the plan makes: loss of a text, and how far predictions move."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from megatron_patch import cli
from megatron_patch.errors import UserError
from megatron_patch.pruning import apply, dry_run, plan, verify
from megatron_patch.pruning.dry_run import DryRun
from megatron_patch.pruning.load import load_tokenizer
from megatron_patch.pruning.prompts import encode_file
from megatron_patch.pruning.wish import Wish
from tests.pruning import checkpoints, oracle
from tests.tiny import make_tiny_tokenizer

TEXTS = [f"row {i} says {'a b ' * (i % 7)}" for i in range(11)]
VOCABULARY = 320  # room for the byte tokenizer


def make_model(path, model_type, **changes):
    # The indexers' top-k is above every row: among equal scores transformers' choice depends on the padding.
    indexer = {} if model_type in ("deepseek_v2", "deepseek_v3") else {"index_topk": 64}
    model = checkpoints.make(path, model_type, vocab_size=VOCABULARY, **indexer, **changes)
    make_tiny_tokenizer(model)
    return model


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


@torch.no_grad()
def expected(model, pruned, rows):
    """Loss of both and KL, nats per token, from transformers' logits of one row at a time."""
    whole, small = oracle.load(model), oracle.load(pruned)
    loss, other, kl, tokens = 0.0, 0.0, 0.0, 0
    for row in rows:
        ids = torch.tensor([row])
        log_p, log_q = (m(ids, use_cache=False).logits[0, :-1].double().log_softmax(-1) for m in (whole, small))
        loss += float(F.nll_loss(log_p, ids[0, 1:], reduction="sum"))
        other += float(F.nll_loss(log_q, ids[0, 1:], reduction="sum"))
        kl += float(F.kl_div(log_q, log_p, reduction="sum", log_target=True))
        tokens += len(row) - 1
    return loss / tokens, other / tokens, kl / tokens, tokens


@pytest.mark.parametrize("wish", [["--keep", "8"], ["--keep", "7", "--groups", "flatten"]])
@pytest.mark.parametrize("model_type", checkpoints.FAMILIES)
def test_figures_are_those_of_the_pruned_model(tmp_path, texts, capsys, monkeypatch, model_type, wish):
    monkeypatch.setattr(dry_run, "LOGITS_AT_ONCE", 5 * VOCABULARY)  # the positions of a batch come in parts
    model = make_model(tmp_path / "model", model_type)
    stats = checkpoints.make_statistics(model, tmp_path / "stats")
    file = tmp_path / "plan.json"
    flags = ["--dry-run", texts, "--batch-size", "4", "--dtype", "float32", "--device", "cpu"]
    argv = ["prune", "plan", "--model", model, "--stats", stats, "--output", file, *wish, *flags]
    assert cli.dispatch(list(map(str, argv))) == 0
    apply.run(model, file, tmp_path / "pruned", progress=False)
    got = json.loads(file.read_text())["dry_run"]
    loss, other, kl, tokens = expected(model, tmp_path / "pruned", encode_file(load_tokenizer(model), texts).rows)
    assert (got["rows"], got["tokens"], got["dtype"], got["file"]) == (len(TEXTS), tokens, "float32", str(texts))
    assert got["loss"] == pytest.approx([loss, other], abs=1e-5) and got["kl"] == pytest.approx(kl, abs=1e-5)
    assert got["perplexity"] == pytest.approx([math.exp(value) for value in got["loss"]])
    assert kl > 1e-3 and abs(loss - other) > 1e-3, "pruning must matter here"
    out = capsys.readouterr().out
    assert f"loss {got['loss'][0]:.4f} -> {got['loss'][1]:.4f} nats per token" in out
    assert f"KL(whole || masked) {got['kl']:.4f}" in out


def test_keeping_everything_changes_nothing(tmp_path, texts):
    model = make_model(tmp_path / "model", "deepseek_v4")
    plan.run(model, Wish(keep=checkpoints.EXPERTS), output=tmp_path / "p", dry=DryRun(texts, dtype="float32", device="cpu"))
    got = json.loads((tmp_path / "p").read_text())["dry_run"]
    assert got["kl"] == 0 and got["loss"][0] == got["loss"][1]


def test_a_dry_run_of_an_applied_plan_changes_nothing_else(tmp_path, texts):
    """Asked for after `apply`: the output is still of this plan, for `--resume` and for `verify`."""
    model = make_model(tmp_path / "model", "deepseek_v2")
    stats, file = checkpoints.make_statistics(model, tmp_path / "stats"), tmp_path / "plan.json"
    plan.run(model, Wish(keep=8), stats=stats, output=file)
    before = json.loads(file.read_text())
    apply.run(model, file, tmp_path / "out", progress=False)
    plan.run(model, Wish(keep=8), stats=stats, output=file, dry=DryRun(texts, device="cpu"))
    after = json.loads(file.read_text())
    assert after.pop("dry_run") and after == before
    assert apply.run(model, file, tmp_path / "out", resume=True, progress=False) == 0
    assert verify.run(model, tmp_path / "out", file, logits=False) == 0


def test_chats_and_keys(tmp_path):
    model = make_model(tmp_path / "model", "deepseek_v2")
    chats, other = tmp_path / "chats.jsonl", tmp_path / "other.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}))
    other.write_text(json.dumps({"body": "some text"}))
    for settings in (DryRun(chats, chat=True), DryRun(other, text_key="body", max_length=5)):
        (row,) = dry_run.encode(settings, model)
        assert len(row) == 5 or settings.chat
    with pytest.raises(UserError, match="'text' must be a text"):
        dry_run.encode(DryRun(other), model)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dry-run", "no/such"], "--dry-run must be a file of JSON lines: no/such is none"),
        (["--dry-run", "TEXTS", "--max-length", "1"], "--max-length must be 2 or more: 1"),
        (["--dry-run", "TEXTS", "--batch-size", "0"], "--batch-size must be 1 or more: 0"),
        (["--dry-run", "TEXTS", "--text-key", "body"], "'body' must be a text"),
        (["--chat"], "--chat is of a --dry-run: none was asked for"),
        (["--max-length", "9"], "--max-length is of a --dry-run"),
    ],
)
def test_refusals(tmp_path, texts, flags, message):
    """Before the plan is made, and nothing is written."""
    model = make_model(tmp_path / "model", "deepseek_v2")
    argv = ["prune", "plan", "--model", str(model), "--keep", "16", "--output", str(tmp_path / "plan.json")]
    with pytest.raises(UserError, match=message):
        cli.dispatch([*argv, *(str(texts) if flag == "TEXTS" else flag for flag in flags)])
    assert not (tmp_path / "plan.json").exists()


def test_a_model_that_gives_nan_is_refused(tmp_path, texts):
    config = {**checkpoints.CONFIGS["deepseek_v2"], "vocab_size": VOCABULARY}
    state = checkpoints.state_of(config)
    state["model.norm.weight"][0] = torch.nan
    model = checkpoints.write(tmp_path / "model", config, state)
    make_tiny_tokenizer(model)
    with pytest.raises(UserError, match=r"losses must be finite and below 700 nats per token: .* gives nan, masked nan; try --dtype float32"):
        plan.run(model, Wish(keep=16), output=tmp_path / "p", dry=DryRun(texts, device="cpu"))
    assert not (tmp_path / "p").exists()


def test_rows_without_a_token_to_score(tmp_path):
    model = make_model(tmp_path / "model", "deepseek_v2")
    tokenizer = model / "tokenizer_config.json"
    content = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps({**content, "bos_token": None}))
    (tmp_path / "short.jsonl").write_text(json.dumps({"text": "a"}))
    with pytest.raises(UserError, match="--dry-run must have a row of 2 tokens or more"):
        dry_run.encode(DryRun(tmp_path / "short.jsonl"), model)
