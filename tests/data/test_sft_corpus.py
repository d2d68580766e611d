"""Chats to samples: counts that add up, lengths that fit, and a dataset that gives back what was written."""

import json

import pyarrow.parquet as pq
import pytest

from megatron_patch.data.sft_dataset import SftDataset
from megatron_patch.data.tokenizer import load_tokenizer, template_sha256, tokenizer_sha256
from megatron_patch.errors import UserError
from tests.data.files import chat, sft, write_as, write_jsonl

LENGTHS = {10: 1 + len("User: \n\nAssistant: ") + 10 + 1}


def row(answer: str, question: str = "") -> dict:
    return {"messages": chat(question, answer)}


def test_samples_and_meta(tmp_path, tiny_tokenizer):
    source = write_jsonl(tmp_path / "in.jsonl", [row("a" * 10), {"instruction": "q", "output": "b"}])
    meta = sft([source], tiny_tokenizer, tmp_path / "out")
    assert meta == json.loads((tmp_path / "out" / "meta.json").read_text())
    table = pq.read_table(tmp_path / "out" / "samples.parquet").to_pydict()
    assert [sum(mask) for mask in table["loss_mask"]] == [1 + 10 + 1, 1 + 1 + 1]  # space, answer, end token
    assert [ids[-1] for ids in table["input_ids"]] == [2, 2]
    assert meta["longest"] == LENGTHS[10] == len(table["input_ids"][0])
    assert (meta["samples"], meta["rows"], meta["tokens"]) == (2, 2, sum(map(len, table["input_ids"])))
    assert (meta["supervised_tokens"], meta["truncated"], meta["dropped"]) == (15, 0, {})
    tokenizer = load_tokenizer(tiny_tokenizer)
    assert meta["tokenizer_sha256"] == tokenizer_sha256(tokenizer)
    assert meta["template_sha256"] == template_sha256(tokenizer)
    assert meta["assistant_tokens_by"] == "prefix differences"


@pytest.mark.parametrize("extension", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_other_file_types_give_the_same_samples(tmp_path, tiny_tokenizer, extension):
    rows = [row(f"answer {i}") for i in range(20)]
    sft([write_as(tmp_path / "in.jsonl", rows)], tiny_tokenizer, tmp_path / "a")
    sft([write_as(tmp_path / f"in{extension}", rows)], tiny_tokenizer, tmp_path / "b", workers=2)
    assert pq.read_table(tmp_path / "a" / "samples.parquet") == pq.read_table(tmp_path / "b" / "samples.parquet")


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_overlong_samples_are_counted(tmp_path, tiny_tokenizer, overlong):
    """One fits exactly, one is a token too long, one has its answer beyond the limit."""
    source = write_jsonl(tmp_path / "in.jsonl", [row("a" * 10), row("a" * 11), row("a", question="q" * 100)])
    meta = sft([source], tiny_tokenizer, tmp_path / "out", seq_length=LENGTHS[10], overlong=overlong)
    samples = pq.read_table(tmp_path / "out" / "samples.parquet").to_pydict()
    if overlong == "drop":
        assert (meta["samples"], meta["truncated"]) == (1, 0)
        assert meta["dropped"] == {"longer than --seq-length": 2}
    else:
        assert (meta["samples"], meta["truncated"]) == (2, 1)
        assert meta["dropped"] == {"no supervised token left after truncation": 1}
        assert [ids[-1] for ids in samples["input_ids"]] == [2, samples["input_ids"][1][-2]]
    assert meta["samples"] + sum(meta["dropped"].values()) == meta["rows"]
    assert all(len(ids) <= LENGTHS[10] for ids in samples["input_ids"])
    assert all(any(mask) for mask in samples["loss_mask"])
    with pytest.raises(UserError, match=r"in\.jsonl:2: .*--strict"):
        sft([source], tiny_tokenizer, tmp_path / "s", seq_length=LENGTHS[10], overlong=overlong, strict=True)


def test_everything_dropped_is_an_error(tmp_path, tiny_tokenizer):
    """LLaMA-Factory 9493: a run went on with no sample at all."""
    source = write_jsonl(tmp_path / "in.jsonl", [row("a" * 99), {"messages": [{"role": "user", "content": "q"}]}])
    with pytest.raises(UserError) as error:
        sft([source], tiny_tokenizer, tmp_path / "out", seq_length=20)
    assert "no sample left of 2 rows" in str(error.value)
    assert f"1 dropped: longer than --seq-length (first: {source}:1)" in str(error.value)
    assert f"1 dropped: no assistant turn (first: {source}:2)" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_wrong_arguments_and_rows(tmp_path, tiny_tokenizer):
    source = write_jsonl(tmp_path / "in.jsonl", [row("a"), {"messages": [{"role": "alien", "content": "x"}]}])
    with pytest.raises(UserError, match=r"in\.jsonl:2: message 1: unknown role 'alien'"):
        sft([source], tiny_tokenizer, tmp_path / "out", workers=2)
    with pytest.raises(UserError, match="--seq-length must be at least 2"):
        sft([source], tiny_tokenizer, tmp_path / "out", seq_length=1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match="must be a new or empty directory"):
        sft([source], tiny_tokenizer, tmp_path / "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "in.jsonl"]


def test_an_empty_output_directory_is_used(tmp_path, tiny_tokenizer):
    (tmp_path / "out").mkdir()
    assert sft([write_jsonl(tmp_path / "in.jsonl", [row("a")])], tiny_tokenizer, tmp_path / "out")["samples"] == 1
    assert len(SftDataset(tmp_path / "out", seq_length=512)) == 1
