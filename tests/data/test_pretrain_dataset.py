"""megatron-core's datasets over prepared text: right tokens, and refusals instead of hangs and silent mixing."""

import json
import shutil
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron_patch.data.batch import collate
from megatron_patch.data.pretrain_dataset import build_pretrain_datasets, parse_blend
from megatron_patch.data.repeated_rows import CUT_SEED, RepeatedRows
from megatron_patch.errors import UserError
from tests.data.files import pretrain, write_jsonl

EOS, VOCABULARY = 2, 320


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tiny_tokenizer):
    """Two prefixes that can be told apart by their letters."""
    path = tmp_path_factory.mktemp("corpus")
    for letter, number in (("a", 40), ("b", 40)):
        rows = [{"text": letter * (5 + i % 9)} for i in range(number)]
        pretrain([write_jsonl(path / f"{letter}.jsonl", rows)], tiny_tokenizer, path / letter)
    return path


@pytest.fixture
def build(corpus, tmp_path):
    def build(*data_path, **settings):
        defaults = {
            "valid_data_path": None, "split": "90,10", "seq_length": 16, "train_samples": 50, "valid_samples": 5,
            "seed": 1, "cache_dir": tmp_path / "cache", "eos_id": EOS, "pad_id": EOS, "vocab_size": VOCABULARY,
        }  # fmt: skip
        return build_pretrain_datasets(data_path=data_path or [str(corpus / "a")], **{**defaults, **settings})

    return build


def tokens_of(dataset, number) -> list[list[int]]:
    return [dataset[i].tokens.tolist() for i in range(number)]


def test_rows_run_on_through_documents(build):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # pad = EOS makes GPTDataset warn, and count EOS as padding
        train, valid = build()
    assert len(train) >= 50 and len(valid) >= 5
    for row in (train[0], train[49], valid[0]):
        assert len(row.tokens) == len(row.labels) == len(row.loss_mask) == 16
        assert torch.equal(row.tokens[1:], row.labels[:-1])
        assert row.loss_mask.all()
    everything = [t for row in tokens_of(train, 50) for t in row]
    assert {1, EOS, 3 + 64} == set(everything)
    pairs = [pair for row in tokens_of(train, 50) for pair in pairwise(row)]
    assert {after for before, after in pairs if before == EOS} == {1}  # documents stay in one piece


def test_documents_are_isolated_in_batches(build):
    train, _ = build()
    batch = collate([(train[i], True) for i in range(4)], cut_after=EOS)
    for first, last in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        assert EOS not in batch.tokens[first : last - 1]
        assert 1 not in batch.tokens[first + 1 : last]  # BOS only in front
    assert batch.loss_mask[batch.tokens == EOS].sum() == 0
    assert batch.loss_mask[batch.labels == EOS].sum() > 0  # the end is learned


def test_order_is_a_function_of_the_seed(build, tmp_path):
    first = tokens_of(build()[0], 50)
    assert tokens_of(build(cache_dir=tmp_path / "other")[0], 50) == first
    assert tokens_of(build(seed=2)[0], 50) != first


def test_training_and_validation_share_no_document(corpus, build, tmp_path, tiny_tokenizer):
    rows = [{"text": chr(33 + i) * 6} for i in range(60)]
    prefix = tmp_path / "each"
    pretrain([write_jsonl(tmp_path / "each.jsonl", rows)], tiny_tokenizer, prefix)
    train, valid = build(str(prefix), split="80,20", train_samples=60, valid_samples=10)
    letters = [{t for row in tokens_of(part, n) for t in row} - {1, EOS} for part, n in ((train, 60), (valid, 10))]
    assert not letters[0] & letters[1]
    assert len(letters[0]) == 48


def test_blend_follows_the_weights(corpus, build, device):
    train, valid = build("0.3", str(corpus / "a"), "0.7", str(corpus / "b"), train_samples=200, valid_samples=20)
    for part, number in ((train, 200), (valid, 20)):
        share = sum(3 + 65 in row for row in tokens_of(part, number)) / number
        assert share == pytest.approx(0.7, abs=0.03)


def test_separate_validation_data(corpus, build):
    train, valid = build(valid_data_path=[str(corpus / "b")], train_samples=100)
    assert {t for row in tokens_of(train, 100) for t in row} == {1, EOS, 3 + 64}
    assert {t for row in tokens_of(valid, 5) for t in row} == {1, EOS, 3 + 65}
    assert build(valid_data_path=[str(corpus / "b")], valid_samples=0)[1] is None
    assert build(valid_samples=0, split="1,0")[1] is None


def test_data_prepared_again_are_not_read_through_an_old_cache(corpus, build, tmp_path, tiny_tokenizer):
    """megatron-core names its cache by path: without the data's hash, rows would be cut where the old documents were."""
    prefix = tmp_path / "P"
    for text in ("c" * 40, "d"):
        for file in tmp_path.glob("P.*"):
            file.unlink()
        pretrain([write_jsonl(tmp_path / "in.jsonl", [{"text": text}] * 20)], tiny_tokenizer, prefix)
        rows = tokens_of(build(str(prefix))[0], 50)
    everything = [t for row in rows for t in row]
    assert everything.count(EOS) > len(everything) / 4  # BOS d EOS, BOS d EOS, ...


@pytest.mark.parametrize(
    "path", [["0.3", "P", "Q"], ["P", "Q"], ["0", "P", "1", "Q"], ["-1", "P", "1", "Q"], ["nan", "P"]]
)
def test_bad_blends(path):
    with pytest.raises(UserError, match="one prefix, or a weight > 0 before each prefix"):
        parse_blend(path)


def test_good_blends():
    assert parse_blend(["P"]) == (["P"], None)
    assert parse_blend(["0.5", "P"]) == (["P"], None)
    assert parse_blend(["0.3", "P", "0.7", "Q"]) == (["P", "Q"], [0.3, 0.7])
    with pytest.raises(UserError, match="names a prefix twice"):
        parse_blend(["0.3", "P", "0.7", "P"])


def test_foreign_data_are_refused(corpus, build):
    made_with = json.loads((corpus / "a.json").read_text())["tokenizer_sha256"]
    build(tokenizer_sha256=made_with)
    with pytest.raises(UserError, match=r"must be made with the run's tokenizer: .*the run 000000000000;"):
        build(tokenizer_sha256="0" * 64)
    with pytest.raises(UserError, match="has EOS 2 and 259 ids, the model EOS 2 and 100 ids"):
        build(vocab_size=100)
    with pytest.raises(UserError, match="the model EOS 3"):
        build(eos_id=3)
    with pytest.raises(UserError, match=r"none\.json is not readable"):
        build(str(corpus / "none"))


def test_splits_that_leave_a_part_empty_are_refused(build):
    """megatron-core would count epochs of no documents forever."""
    with pytest.raises(UserError, match="--split 999,1 leaves no validation document of the 40 in"):
        build(split="999,1")
    with pytest.raises(UserError, match="--split 1,0 has no share for validation"):
        build(split="1,0")


def test_damaged_files_are_refused(corpus, build, tmp_path):
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(corpus / f"a{suffix}", tmp_path / f"P{suffix}")
    data, index = (tmp_path / "P.bin").read_bytes(), (tmp_path / "P.idx").read_bytes()
    (tmp_path / "P.bin").write_bytes(data[:-2])
    with pytest.raises(UserError, match=f"must have {len(data)} bytes .* it has {len(data) - 2};"):
        build(str(tmp_path / "P"))
    (tmp_path / "P.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"P\.bin is missing or empty"):
        build(str(tmp_path / "P"))
    (tmp_path / "P.bin").write_bytes(data)
    for damaged in (b"x" * 100, index[:20], index[:60], index + b"x"):
        (tmp_path / "P.idx").write_bytes(damaged)
        with pytest.raises(UserError, match=r"P\.idx .* damaged"):
            build(str(tmp_path / "P"))


def by_number(dataset) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for position in range(len(dataset)):
        row = dataset[position]
        assert found.setdefault(row.number, row.tokens.tolist()) == row.tokens.tolist()
    return found


def test_an_epoch_takes_every_row_once(build):
    train, _ = build(repeat_rows=True, train_samples=60)
    rows = train.dataset.rows
    assert 15 < rows < 25 and len(train) == 60
    epochs = [train.numbers[i : i + rows].tolist() for i in (0, rows)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs) and epochs[0] != epochs[1]
    assert len(by_number(train)) == rows


def test_rows_do_not_depend_on_seed_or_length_of_the_run(build):
    """Else no other run could use what one has kept."""
    one, _ = build(repeat_rows=True, train_samples=60, seed=1)
    other, _ = build(repeat_rows=True, train_samples=100, seed=2)
    assert by_number(one) == by_number(other) and one.sha256 == other.sha256
    assert one.numbers.tolist() != other.numbers[:60].tolist()


def test_one_epoch_at_the_default_seed_is_the_run_without_it(build):
    same, held = build(repeat_rows=True, train_samples=12, seed=CUT_SEED)
    fresh, held_too = build(train_samples=12, seed=CUT_SEED)
    assert tokens_of(same, 12) == tokens_of(fresh, 12) and tokens_of(held, 5) == tokens_of(held_too, 5)
    assert fresh.numbers is None and fresh[0].number == -1
    assert not torch.equal(build(train_samples=50, seed=CUT_SEED)[0][1].tokens, same[1].tokens), "else this flag were for nothing"


def test_a_blend_takes_its_weights(corpus, build, device):
    train, _ = build("0.3", str(corpus / "a"), "0.7", str(corpus / "b"), repeat_rows=True, train_samples=200, valid_samples=20)
    share = sum(3 + 65 in row for row in tokens_of(train, 200)) / 200
    assert share == pytest.approx(0.7, abs=0.03)
    rows = by_number(train)
    assert sorted(rows) == list(range(train.dataset.rows))
    fresh, _ = build("0.3", str(corpus / "a"), "0.7", str(corpus / "b"), train_samples=20, valid_samples=20, seed=CUT_SEED)
    same, _ = build("0.3", str(corpus / "a"), "0.7", str(corpus / "b"), repeat_rows=True, train_samples=20, valid_samples=20, seed=CUT_SEED)
    assert tokens_of(fresh, 20) == tokens_of(same, 20)
    separate, _ = build(valid_data_path=[str(corpus / "b")], repeat_rows=True)
    assert {t for row in tokens_of(separate, 50) for t in row} == {1, 2, 3 + 64}


def test_a_prefix_without_a_row_is_refused(build):
    with pytest.raises(UserError, match="--epoch-rows same needs a row in each prefix"):
        build(repeat_rows=True, seq_length=4096)


def test_a_run_shorter_than_an_epoch():
    rows = RepeatedRows([range(1000)], ["P"], None, 10, 5)
    assert len(set(rows.numbers.tolist())) == 10 and np.all(rows.numbers < 1000)
