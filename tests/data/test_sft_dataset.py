"""Stored samples as training rows, and the refusal of samples that were made for something else."""

import json
import shutil

import pytest

from megatron_patch.data.batch import collate
from megatron_patch.data.sft_dataset import SftDataset, build_sft_datasets
from megatron_patch.data.split import parse_split
from megatron_patch.errors import UserError
from tests.data.files import chat, sft, write_jsonl


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer):
    path = tmp_path_factory.mktemp("sft")
    rows = [{"messages": chat(f"q{i}", "a" * (i % 7 + 1), f"r{i}", "b")} for i in range(40)]
    sft([write_jsonl(path / "in.jsonl", rows)], tiny_tokenizer, path / "out", seq_length=64)
    return path / "out"


def test_a_row_is_the_sample_shifted_by_one(folder):
    dataset = SftDataset(folder, seq_length=64)
    ids, mask = dataset.sample(3)
    row = dataset[3]
    assert row.tokens.tolist() == ids[:-1].tolist()
    assert row.labels.tolist() == ids[1:].tolist()
    learned = [label for label, weight in zip(row.labels.tolist(), row.loss_mask.tolist(), strict=True) if weight]
    assert learned == ids[mask == 1].tolist()  # off by one here is verl 3287
    assert learned.count(2) == 2 and row.loss_mask.sum() == (1 + 4 + 1) + (1 + 1 + 1)


def test_one_document_per_sample_although_eos_stands_inside(folder):
    dataset = SftDataset(folder, seq_length=64)
    batch = collate([(dataset[i], True) for i in range(3)])
    assert batch.cu_seqlens.diff().tolist() == [len(dataset[i].tokens) for i in range(3)]


def test_split_is_fixed_and_complete(folder):
    settings = {"data_path": folder, "valid_data_path": None, "seq_length": 64}
    train, valid = build_sft_datasets(split="90,10", **settings)
    again, _ = build_sft_datasets(split="90,10", **settings)
    assert (len(train), len(valid)) == (36, 4)
    assert train.indices == again.indices
    assert sorted([*train.indices, *valid.indices]) == list(range(40))
    assert valid.indices != list(range(36, 40))  # a file sorted by topic must not give validation one topic
    assert build_sft_datasets(split="1,0", **settings)[1] is None
    with pytest.raises(UserError, match="--split 999,1 leaves no validation sample of 40"):
        build_sft_datasets(split="999,1", **settings)
    train, valid = build_sft_datasets(**{**settings, "valid_data_path": folder}, split="90,10")
    assert (len(train), len(valid)) == (40, 40)


def test_samples_of_another_tokenizer_template_or_length_are_refused(folder):
    hashes = {
        key: json.loads((folder / "meta.json").read_text())[key] for key in ("tokenizer_sha256", "template_sha256")
    }
    assert len(SftDataset(folder, seq_length=64, **hashes)) == 40
    for key in hashes:
        with pytest.raises(UserError, match=f"made with the run's {key.split('_')[0]}: .*the run 000000000000;"):
            SftDataset(folder, seq_length=64, **{**hashes, key: "0" * 64})
    with pytest.raises(UserError, match=r"must fit --seq-length: .* one of \d+ tokens, --seq-length is 20;"):
        SftDataset(folder, seq_length=20)


def test_damaged_folders_are_refused(folder, tmp_path):
    with pytest.raises(UserError, match=r"has no readable meta\.json"):
        SftDataset(tmp_path, seq_length=64)
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    data = (broken / "samples.parquet").read_bytes()
    (broken / "samples.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"cannot read .*samples\.parquet"):
        SftDataset(broken, seq_length=64)
    (broken / "samples.parquet").unlink()
    with pytest.raises(UserError, match=r"cannot read .*samples\.parquet"):
        SftDataset(broken, seq_length=64)
    (broken / "samples.parquet").write_bytes(data)
    meta = json.loads((broken / "meta.json").read_text())
    (broken / "meta.json").write_text(json.dumps({**meta, "samples": 41}))
    with pytest.raises(UserError, match="disagree: 41 samples"):
        SftDataset(broken, seq_length=64)
    (broken / "meta.json").write_text(json.dumps({**meta, "schema": 2}))
    with pytest.raises(UserError, match="schema 2"):
        SftDataset(broken, seq_length=64)


@pytest.mark.parametrize("split", ["", "90", "a,b", "0,1", "90,-1", "1,2,3,4", "nan,1", "inf,1"])
def test_bad_splits(split):
    with pytest.raises(UserError, match="--split is two or three shares"):
        parse_split(split)


def test_good_splits():
    assert parse_split("99,1") == (0.99, 0.01, 0.0)
    assert parse_split("90, 5, 5") == (0.9, 0.05, 0.05)
