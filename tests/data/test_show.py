"""What a person sees of the data must be what the model gets."""

import io
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megatron_patch.data.batch import Row, collate
from megatron_patch.data.batch_file import KeptBatch, write_batches
from megatron_patch.data.show import ShowSettings, render_tokens, show_samples, token_texts
from megatron_patch.data.tokenizer import load_tokenizer, tokenizer_sha256
from megatron_patch.errors import UserError
from tests.data.files import chat, pretrain, sft, write_jsonl
from tests.tiny import make_tiny_tokenizer

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path, tiny_tokenizer) -> Path:
    rows = [{"messages": chat("q", "Yes")}, {"messages": chat("r", "No")}]
    sft([write_jsonl(tmp_path / "in.jsonl", rows)], tiny_tokenizer, tmp_path / "out")
    return tmp_path / "out"


def shown(path: Path, out: io.StringIO | None = None, **settings) -> str:
    out = out or io.StringIO()
    show_samples(ShowSettings(str(path), **settings), out)
    return out.getvalue()


def test_learned_tokens_stand_in_brackets_without_a_terminal(folder):
    text = shown(folder, n=1)
    assert r"A|s|s|i|s|t|a|n|t|:|[[ |Y|e|s|<eos>]]" in text
    assert r"<bos>|U|s|e|r|:| |q|\n|\n|" in text
    assert "sample 2" not in text and "\033" not in text


def test_learned_tokens_are_green_on_a_terminal_unless_no_color(folder, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = shown(folder, Terminal())
    assert "\033[1;32m " in text and "[[" not in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(folder, Terminal()) == shown(folder)


def test_document_boundaries_of_pretraining_text(tmp_path, tiny_tokenizer):
    pretrain([write_jsonl(tmp_path / "in.jsonl", [{"text": "ab"}, {"text": "cdef"}])], tiny_tokenizer, tmp_path / "P")
    text = shown(tmp_path / "P", seq_length=6)
    rows = [line for line in text.splitlines() if "|" in line or line.startswith("--")][1:]
    assert rows == [
        "-- document 1, 4 tokens", "<bos>|a|b|<eos>", "-- document 2, 2 tokens", "<bos>|c",
        "-- document 2, 4 tokens", "d|e|f|<eos>",
    ]  # fmt: skip


def test_characters_of_several_tokens_and_control_characters(tiny_tokenizer):
    tokenizer = load_tokenizer(tiny_tokenizer)
    ids = tokenizer("é你\x1b[31m", add_special_tokens=False).input_ids
    texts = token_texts(tokenizer, ids)
    assert texts[:5] == ["", "é", "", "", "你"]
    assert len(texts) == len(ids)
    assert "\x1b" not in render_tokens(texts, [0] * len(ids), False)
    assert token_texts(tokenizer, ids[:1]) == ["\ufffd"]


def test_micro_batches_that_a_run_kept(tmp_path, tiny_tokenizer):
    """A document's last label is no token of it; it is shown where it is learned."""
    tokenizer = load_tokenizer(tiny_tokenizer)
    ids = torch.tensor(tokenizer("abcd", add_special_tokens=False).input_ids)
    row = Row(ids[:3], ids[1:], torch.tensor([0.0, 1.0, 1.0]))
    kept = [KeptBatch(collate([(row, True), (row._replace(loss_mask=torch.zeros(3)), True)]), [6, 7], [2, 5], math.nan)]
    meta = {"kind": "sft", "iteration": "9", "rank": "1", "tokenizer": str(tiny_tokenizer)}
    write_batches(tmp_path / "kept", kept, meta | {"tokenizer_sha256": tokenizer_sha256(tokenizer)})
    assert shown(tmp_path / "kept").splitlines() == [
        "sft, iteration 9, rank 1: 1 micro-batches; | between tokens; [[...]]: learned", "",
        "== micro-batch 1: 6 tokens, 2 learned, loss nan; samples 6 to 7 of the run, 2, 5 of the data, from 0",
        "-- document 1, 3 tokens", "a|b|[[c|d]]", "-- document 2, 3 tokens", "a|b|c",
    ]  # fmt: skip
    (tmp_path / "damaged").write_bytes((tmp_path / "kept").read_bytes()[:-9])
    safetensors.torch.save_file({"a": ids}, tmp_path / "other")
    for name, message in (("damaged", "must be whole"), ("other", "holds something else")):
        with pytest.raises(UserError, match=message):
            shown(tmp_path / name)


def test_errors(folder, tmp_path):
    with pytest.raises(UserError, match="nothing prepared at"):
        shown(tmp_path / "none")
    make_tiny_tokenizer(tmp_path / "other")
    saved = (tmp_path / "other" / "tokenizer.json").read_text()
    (tmp_path / "other" / "tokenizer.json").write_text(saved.replace('"Ġ"', '"ĠĠ"'))
    with pytest.raises(UserError, match="is not the one that made these data"):
        shown(folder, tokenizer=str(tmp_path / "other"))


def script(name: str, *arguments: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, f"data/{name}.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_scripts_end_with_one_line_and_exit_code_2(tmp_path):
    done = script(
        "prepare_pretrain", "--input", "none.jsonl", "--tokenizer", tmp_path, "--output-prefix", tmp_path / "P"
    )
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert done.stderr.startswith("error: input files must exist: 'none.jsonl'")
    done = script("prepare_sft", "--input", "a", "--tokenizer", "b", "--seq-lenght", "9", "--output", "c")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "did you mean --seq-length" in done.stderr
    done = script("show_samples", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_scripts_from_text_to_view(tmp_path, tiny_tokenizer):
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat("q", "Yes")}])
    arguments = ["--input", chats, "--tokenizer", tiny_tokenizer, "--seq-length", 64, "--output", tmp_path / "sft"]
    assert script("prepare_sft", *arguments).returncode == 0
    done = script("show_samples", tmp_path / "sft", "--n", 1)
    assert done.returncode == 0
    assert "[[ |Y|e|s|<eos>]]" in done.stdout
