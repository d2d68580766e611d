"""Whatever rows come: counts add up, what is kept is what was written, and only answers are learned.

Bounded and, by the profile in tests/conftest.py, the same examples in every run.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_patch.data.batch import Row, collate
from megatron_patch.data.sft_dataset import SftDataset
from megatron_patch.data.tokenizer import load_tokenizer
from megatron_patch.errors import UserError
from tests.data.files import pretrain, sft

EXAMPLES = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
FEW = settings(EXAMPLES, max_examples=25)
ODD = ["\0", "\x07", "\x1b[31m", "\r", "\r\n", "\u2028", "\ufeff", "\ufffd", "\U0001f600", "<eos>", "<bos>", "é", " ", "\t"]
LONE = ["\ud800.", "\udfff"]  # never next to each other, where they would be one letter


@contextmanager
def folder() -> Iterator[Path]:
    """A directory per example: hypothesis runs them all in one test."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def _quiet(capsys):
    """Tables and bars of a hundred preparations."""


letters = st.characters(exclude_categories=["Cs"])
texts = st.lists(letters | st.sampled_from(ODD), max_size=12).map("".join)
any_text = st.lists(texts | st.sampled_from(LONE), max_size=3).map("".join)
scalars = st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2), max_leaves=4)
rows = st.fixed_dictionaries({"text": any_text | st.none()}, optional={"id": values, "meta": values})
escapes = st.booleans()


@st.composite
def good_lines(draw) -> tuple[bytes, str | None]:
    """(line, its text; None where it is blank): only lines that a strict reader must accept."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from([b"", b" \t", b"\r"])), None
    row = draw(rows)
    line = json.dumps(row, ensure_ascii=True)
    if draw(escapes) and not any(letter in line for letter in ("\\ud", "\\uD")):
        line = json.dumps(row, ensure_ascii=False)
    end = draw(st.sampled_from(["", "\r", "  "]))
    return (line + end).encode(), row["text"] or ""


def _twice(text: str) -> bytes:
    return json.dumps({"text": text})[:-1].encode() + b', "text": "again"}'


bad_lines = st.one_of(
    st.sampled_from([b"\0", b"{", b"[]", b'"x"', b"null", b"{'text': 'a'}", b'{"text": "\xff"}', b'{"text": "\x01"}',
                     b'{"text": "a"} {"text": "b"}', b'{"other": "a"}', b"\xef\xbb\xbf{\"text\": \"a\"}", b'{"text": "a',
                     b'{"text": 1e999}', b'{"text": "a", "n": ' + b"9" * 5000 + b"}"]),
    texts.map(_twice),
    st.booleans().map(lambda flag: json.dumps({"text": flag}).encode()),
    st.lists(texts, max_size=2).map(lambda items: json.dumps({"text": items}).encode()),
)  # fmt: skip


def write(path: Path, lines: list[bytes], bom: bool, last_end: bool) -> Path:
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + b"\n".join(lines) + (b"\n" if last_end else b""))
    return path


def expectation(lines: list[tuple[bytes, str | None]]) -> tuple[int, list[str], dict[str, int], int | None]:
    """(rows, kept texts, dropped by reason, number of the first dropped line), by hand."""
    kept, dropped, first = [], {}, None
    for number, (_, text) in enumerate(lines, 1):
        if text is None:
            continue
        lone = any("\ud800" <= letter <= "\udfff" for letter in text)
        reason = "empty text" if not text.strip() else "text that is not valid Unicode" if lone else None
        if reason is None:
            kept.append(text)
        else:
            dropped[reason] = dropped.get(reason, 0) + 1
            first = first or number
    return len(kept) + sum(dropped.values()), kept, dropped, first


@EXAMPLES
@given(lines=st.lists(good_lines(), min_size=1, max_size=8), bom=st.booleans(), last_end=st.booleans())
def test_rows_are_kept_whole_or_counted(tiny_tokenizer, lines, bom, last_end):
    expected_rows, kept, dropped, first = expectation(lines)
    with folder() as path:
        source = write(path / "in.jsonl", [line for line, _ in lines], bom, last_end)
        if not kept:
            assume(source.stat().st_size)
            with pytest.raises(UserError, match=f"no document left of {expected_rows} rows"):
                pretrain([source], tiny_tokenizer, path / "P")
            return
        report = pretrain([source], tiny_tokenizer, path / "P")
        assert (report["rows"], report["documents"], report["dropped"]) == (expected_rows, len(kept), dropped)
        assert report["rows"] == report["documents"] + sum(report["dropped"].values())
        data, tokenizer = IndexedDataset(str(path / "P")), load_tokenizer(tiny_tokenizer)
        documents = [data[i].tolist() for i in range(len(data))]
        assert [tokenizer.decode(ids[1:-1]) for ids in documents] == kept
        assert all(ids[0] == 1 and ids[-1] == 2 and 2 not in ids[1:-1] and 1 not in ids[1:-1] for ids in documents)
        assert report["tokens"] == sum(map(len, documents))
        if first is None:
            pretrain([source], tiny_tokenizer, path / "S", strict=True)
            assert (path / "S.bin").read_bytes() == (path / "P.bin").read_bytes()
        else:
            with pytest.raises(UserError, match=rf"in\.jsonl:{first}: .*--strict allows no dropped row"):
                pretrain([source], tiny_tokenizer, path / "S", strict=True)
            assert not (path / "S.bin").exists()


@EXAMPLES
@given(before=st.lists(good_lines(), max_size=4), bad=bad_lines, after=st.lists(good_lines(), max_size=2))
def test_a_bad_row_stops_the_run_and_is_named(tiny_tokenizer, before, bad, after):
    lines = [*(line for line, _ in before), bad, *(line for line, _ in after)]
    assume(before or not bad.startswith(b"\xef\xbb\xbf"))  # in front it is the file's, and allowed
    with folder() as path:
        source = write(path / "in.jsonl", lines, False, True)
        with pytest.raises(UserError) as error:
            pretrain([source], tiny_tokenizer, path / "out" / "P")
        assert f"in.jsonl:{len(before) + 1}: " in str(error.value) and "; " in str(error.value)
        assert not [item for item in path.rglob("*") if item.is_file() and item != source]


plain_rows = st.lists(st.fixed_dictionaries({"text": texts | st.none(), "n": st.integers(0, 9)}), min_size=1, max_size=6)


@FEW
@given(table=plain_rows)
def test_parquet_and_jsonl_of_the_same_rows_are_the_same(tiny_tokenizer, table):
    assume(any(row["text"] and row["text"].strip() for row in table))
    with folder() as path:
        (path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
        schema = pa.schema([("text", pa.string()), ("n", pa.int64())])
        pq.write_table(pa.Table.from_pylist(table, schema), path / "in.parquet", row_group_size=2)
        reports = [pretrain([path / f"in.{kind}"], tiny_tokenizer, path / kind) for kind in ("jsonl", "parquet")]
        for suffix in (".bin", ".idx"):
            assert (path / f"jsonl{suffix}").read_bytes() == (path / f"parquet{suffix}").read_bytes()
        assert all(reports[0][key] == reports[1][key] for key in reports[0] if key not in ("inputs", "blank_lines"))


# Chats

roles = st.sampled_from(["system", "user", "assistant"])
contents = st.lists(letters | st.sampled_from(["\0", "\r\n", "\u2028", "é", " "]), max_size=12).map("".join)
free_chats = st.lists(st.fixed_dictionaries({"role": roles, "content": contents | st.sampled_from(["<eos>", "\ud800"])}), max_size=5)


@st.composite
def usual_chats(draw) -> list[dict[str, str]]:
    turns = draw(st.lists(st.tuples(contents, contents.filter(str.strip)), min_size=1, max_size=3))
    return [{"role": role, "content": text} for pair in turns for role, text in zip(("user", "assistant"), pair, strict=True)]


chats = st.lists(usual_chats() | free_chats, min_size=1, max_size=5)


def reason_against(messages: list[dict[str, str]], seq_length: int) -> str | None:
    """Why a conversation is no sample, by hand."""
    if not any(m["role"] == "assistant" for m in messages):
        return "no assistant turn"
    if messages[0]["role"] == "assistant":
        return "an assistant turn with nothing before it"
    for m in messages:
        for holds, reason in (
            (m["role"] == "assistant" and not m["content"].strip(), "an empty assistant turn"),
            ("<eos>" in m["content"], "a special token written in the text of a message"),
            ("\ud800" in m["content"], "text that is not valid Unicode"),
        ):
            if holds:
                return reason
    return "longer than --seq-length" if len(rendered(messages)[0]) > seq_length else None


def rendered(messages: list[dict[str, str]]) -> tuple[list[str], list[int]]:
    """(pieces, learned) of the tiny template, a piece a token: bytes and special tokens."""
    pieces, learned = ["<bos>"], [0]

    def add(text: str, is_learned: int) -> None:
        encoded = text.encode()
        pieces.extend(f"{byte:02x}" for byte in encoded)
        learned.extend([is_learned] * len(encoded))

    for m in messages:
        if m["role"] == "assistant":
            add("Assistant:", 0)
            add(f" {m['content']}", 1)
            pieces.append("<eos>")
            learned.append(1)
        else:
            add({"user": "User: ", "system": ""}[m["role"]] + m["content"] + "\n\n", 0)
    return pieces, learned


@EXAMPLES
@given(conversations=chats, seq_length=st.sampled_from([40, 400]))
def test_exactly_the_answers_and_their_ends_are_learned(tiny_tokenizer, conversations, seq_length):
    reasons = [reason_against(messages, seq_length) for messages in conversations]
    kept = [messages for messages, reason in zip(conversations, reasons, strict=True) if reason is None]
    with folder() as path:
        (path / "in.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in conversations))
        prepare = partial(sft, [path / "in.jsonl"], tiny_tokenizer, seq_length=seq_length)
        if not kept:
            with pytest.raises(UserError, match=f"no sample left of {len(conversations)} rows"):
                prepare(output=path / "out")
            assert sorted(item.name for item in path.iterdir()) == ["in.jsonl"]
            return
        meta = prepare(output=path / "out")
        assert meta["dropped"] == {reason: reasons.count(reason) for reason in set(reasons) - {None}}
        assert meta["samples"] + sum(meta["dropped"].values()) == meta["rows"] == len(conversations)
        dataset, tokenizer = SftDataset(path / "out", seq_length=seq_length), load_tokenizer(tiny_tokenizer)
        assert len(dataset) == len(kept)
        names = {number: name for name, number in _byte_names(tokenizer).items()}
        for number, messages in enumerate(kept):
            ids, mask = dataset.sample(number)
            pieces, learned = rendered(messages)
            assert [names[int(i)] for i in ids] == pieces
            assert mask.tolist() == learned
        batch = collate([(dataset[i], True) for i in range(len(kept))], pad_id=0, multiple_of=8)
        assert int(batch.loss_mask.sum()) == meta["supervised_tokens"]
        assert not batch.loss_mask[~batch.valid].any() and int(batch.valid.sum()) == meta["tokens"] - len(kept)
        first = next((n for n, reason in enumerate(reasons, 1) if reason is not None), None)
        if first is not None:
            with pytest.raises(UserError, match=rf"in\.jsonl:{first}: .*--strict"):
                prepare(output=path / "strict", strict=True)


def _byte_names(tokenizer) -> dict[str, int]:
    """Hexadecimal name of each byte, and the special tokens, to the tiny tokenizer's ids."""
    stand_ins = bytes_to_unicode()
    names = {f"{byte:02x}": tokenizer.convert_tokens_to_ids(letter) for byte, letter in stand_ins.items()}
    return names | {"<bos>": 1, "<eos>": 2}


def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's stand-ins: printable bytes are themselves, the others follow behind 255."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}


@FEW
@given(conversations=st.lists(usual_chats(), min_size=1, max_size=4))
def test_chats_in_parquet_are_the_same(tiny_tokenizer, conversations):
    table = [{"messages": messages, "id": i} for i, messages in enumerate(conversations)]
    with folder() as path:
        (path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
        pq.write_table(pa.Table.from_pylist(table), path / "in.parquet")
        for kind in ("jsonl", "parquet"):
            sft([path / f"in.{kind}"], tiny_tokenizer, path / kind, seq_length=400)
        tables = [pq.read_table(path / kind / "samples.parquet") for kind in ("jsonl", "parquet")]
        assert tables[0] == tables[1]


def test_two_workers_write_the_same_bytes(tmp_path, tiny_tokenizer, monkeypatch):
    """Of odd and dropped rows too, in chunks small enough for the workers to overtake each other."""
    from megatron_patch.data import readers

    monkeypatch.setattr(readers, "CHUNK_ROWS", 2)
    odd = [{"text": text} for text in (*ODD, "", *LONE, None, "a" * 300)] * 3
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in odd))
    talks = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": t}]} for t in (*ODD, "", *LONE)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks))
    for workers in (1, 2):
        pretrain([tmp_path / "in.jsonl"], tiny_tokenizer, tmp_path / f"P{workers}", workers=workers)
        sft([tmp_path / "chats.jsonl"], tiny_tokenizer, tmp_path / f"S{workers}", workers=workers)
    for first in [*tmp_path.glob("P1.*"), *(tmp_path / "S1").iterdir()]:
        second = Path(str(first).replace("P1", "P2").replace("S1", "S2"))
        assert first.read_bytes() == second.read_bytes(), first.name


# Packs

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@EXAMPLES
@given(sizes=lengths, counts=st.lists(st.booleans(), min_size=8, max_size=8), multiple_of=st.integers(1, 16))
def test_a_pack_holds_each_row_once_and_pads_behind(sizes, counts, multiple_of):
    total = sum(sizes)
    numbers = torch.arange(total + len(sizes))  # every token distinct, so that a shift shows
    pieces = numbers.split([size + 1 for size in sizes])
    rows = [Row(piece[:-1], piece[1:], torch.ones(len(piece) - 1)) for piece in pieces]
    batch = collate(list(zip(rows, counts, strict=False)), pad_id=7, multiple_of=multiple_of)
    padded = -(-total // multiple_of) * multiple_of
    assert all(len(getattr(batch, name)) == padded for name in ("tokens", "labels", "loss_mask", "valid"))
    ends = torch.tensor(sizes).cumsum(0).tolist()
    assert batch.cu_seqlens.tolist() == [0, *ends] + ([padded] if padded > total else [])
    for row, counted, (first, last) in zip(rows, counts, pairwise([0, *ends]), strict=False):
        assert torch.equal(batch.tokens[first:last], row.tokens) and torch.equal(batch.labels[first:last], row.labels)
        assert batch.valid[first:last].eq(counted).all() and batch.loss_mask[first:last].eq(float(counted)).all()
    assert batch.tokens[total:].eq(7).all()
    assert not batch.valid[total:].any() and not batch.loss_mask[total:].any()
    positions = torch.arange(padded) - torch.repeat_interleave(batch.cu_seqlens[:-1], batch.cu_seqlens.diff())
    assert positions.min() == 0 and int((positions == 0).sum()) == len(batch.cu_seqlens) - 1
