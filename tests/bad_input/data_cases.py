"""Text and chats: the files that users bring, and what the preparation wrote, spoilt."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.bad_input.world import Case, World, edit_bytes, edit_json
from tests.data.files import chat
from tests.tiny import CHAT_TEMPLATE, make_tiny_tokenizer

GOOD = b'{"text": "a b c"}\n'
TEXT: dict[str, tuple[str, bytes, str]] = {  # name: (file name, content, message)
    "empty file": ("a.jsonl", b"", r"must hold data: .*a\.jsonl' is empty \(0 bytes\); write it again"),
    "blank lines only": ("a.jsonl", b"\n \r\n", r"no document left of 0 rows \(the input has no rows\)"),
    "BOM only": ("a.jsonl", b"\xef\xbb\xbf", "no document left of 0 rows"),
    "BOM in the middle": ("a.jsonl", GOOD + b"\xef\xbb\xbf" + GOOD, r"a\.jsonl:2: bad JSON \(Unexpected UTF-8 BOM"),
    "UTF-16": ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), r"a\.jsonl:1: not UTF-8 .*convert the file to UTF-8"),
    "UTF-16 without BOM": ("a.jsonl", '{"text": "a"}\n'.encode("utf-16-le"), r"a\.jsonl:1: bad JSON"),
    "Latin-1": ("a.jsonl", GOOD + '{"text": "né"}\n'.encode("latin-1"), r"a\.jsonl:2: not UTF-8 .*at byte 11"),
    "CESU surrogates": ("a.jsonl", b'{"text": "\xed\xa0\xbd\xed\xb8\x80"}\n', r"a\.jsonl:1: not UTF-8"),
    "carriage returns alone": ("a.jsonl", b'{"text": "a"}\r{"text": "b"}\r', r"a\.jsonl:1: bad JSON \(Extra data"),
    "NUL in a string": ("a.jsonl", b'{"text": "a\0b"}\n', r"a\.jsonl:1: bad JSON \(Invalid control character"),
    "a block of NULs": ("a.jsonl", GOOD + b"\0" * 4096, r"a\.jsonl:2: bad JSON"),
    "half a row": ("a.jsonl", GOOD + b'{"text": "a', r"a\.jsonl:2: bad JSON \(Unterminated string"),
    "an array of rows": ("a.jsonl", b'[{"text": "a"}]\n', r"a\.jsonl:1: a row must be a JSON object, not a list"),
    "a string row": ("a.jsonl", b'"a"\n', r"a\.jsonl:1: a row must be a JSON object, not a string"),
    "Python's quotes": ("a.jsonl", b"{'text': 'a'}\n", r"a\.jsonl:1: bad JSON .*property name .*double quotes"),
    "a key twice": ("a.jsonl", GOOD + b'{"text": "a", "text": "b"}\n', r"a\.jsonl:2: bad JSON \('text' stands twice\)"),
    "a number of 5000 digits": (
        "a.jsonl", b'{"text": "a", "n": ' + b"9" * 5000 + b"}\n", r"a\.jsonl:1: bad JSON \(a number has thousands of digits\)",
    ),
    "nested 100,000 deep": ("a.jsonl", b'{"text": ' + b"[" * 100_000, r"a\.jsonl:1: bad JSON \(nested too deeply\)"),
    "no such key": ("a.jsonl", b'{"txt": "a"}\n', r"a\.jsonl:1: no key 'text'; it has 'txt'; choose one"),
    "text is a list": ("a.jsonl", b'{"text": ["a"]}\n', r"a\.jsonl:1: 'text' must be a string, not a list"),
    "text is NaN": ("a.jsonl", b'{"text": NaN}\n', r"a\.jsonl:1: 'text' must be a string, not a number"),
    "everything empty": (
        "a.jsonl", b'{"text": ""}\n{"text": null}\n', r"no document left of 2 rows \(2 dropped: empty text \(first: .*:1\)\)",
    ),
    "only lone surrogates": ("a.jsonl", b'{"text": "\\ud800"}\n', r"1 dropped: text that is not valid Unicode"),
    "10 MB line without an end": ("a.jsonl", b'{"text": "' + b"a" * 10_000_000, r"a\.jsonl:1: bad JSON \(Unterminated"),
    "truncated gzip": ("a.jsonl.gz", gzip.compress(GOOD * 99)[:-9], r"a\.jsonl\.gz': Compressed file ended"),
    "gzip with rubbish behind": ("a.jsonl.gz", gzip.compress(GOOD) + b"rubbish", r"a\.jsonl\.gz': Not a gzipped file"),
    "gzip of nothing": ("a.jsonl.gz", gzip.compress(b""), "no document left of 0 rows"),
    "plain text named gz": ("a.jsonl.gz", GOOD, r"a\.jsonl\.gz': Not a gzipped file .* fetch it again"),
    "truncated zstd": ("a.jsonl.zst", pa.compress(GOOD * 99, "zstd", asbytes=True)[:-4], "Truncated compressed stream"),
    "damaged zstd": ("a.jsonl.zst", b"(\xb5/\xfd" + b"\xff" * 40, r"a\.jsonl\.zst'.*fetch it again"),
    "an unknown extension": ("a.json", GOOD, r"input files end in \.jsonl, .*a\.json' does not; convert or rename it"),
    "parquet that is none": ("a.parquet", GOOD * 9, r"a\.parquet'.*damaged or not parquet"),
}  # fmt: skip

BAD_UTF8 = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")])
PARQUET: dict[str, tuple[pa.Table, str]] = {
    "parquet without the column": (pa.table({"body": ["a"]}), r"a\.parquet: no key 'text'; it has 'body'"),
    "parquet of bytes": (pa.table({"text": [b"a"]}), r"a\.parquet:1: 'text' must be a string, not bytes"),
    "parquet of structs": (pa.table({"text": [{"x": 1}]}), r"a\.parquet:1: 'text' must be a string, not an object"),
    "parquet of nulls": (pa.table({"text": pa.nulls(3, pa.string())}), r"3 dropped: empty text \(first: .*:1\)"),
    "parquet without rows": (pa.table({"text": pa.array([], pa.string())}), "no document left of 0 rows"),
    "parquet that is not UTF-8": (pa.table({"text": BAD_UTF8}), r"a\.parquet:1: a value cannot be read \('utf-8'"),
    "parquet with a column twice": (
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), r"'text' is of two; rename one",
    ),
}  # fmt: skip

USER = {"role": "user", "content": "q"}
CHATS: dict[str, tuple[list[Any], str]] = {
    "no assistant turn": ([{"messages": [USER]}], r"no sample left of 1 rows \(1 dropped: no assistant turn"),
    "assistant first": ([{"messages": chat("q", "a")[1:]}], "1 dropped: an assistant turn with nothing before it"),
    "no messages": ([{"messages": []}], "1 dropped: no assistant turn"),
    "empty answer": ([{"messages": chat("q", " \n")}], "1 dropped: an empty assistant turn"),
    "all over-long": ([{"messages": chat("q", "a" * 99)}] * 2, "2 dropped: longer than --seq-length"),
    "unknown role": ([{"messages": [USER, {"role": "bot", "content": "a"}]}], r":1: message 2: unknown role 'bot'; use"),
    "content in parts": ([{"messages": [{"role": "user", "content": [{}]}]}], "'content' must be a string, not a list"),
    "content null": ([{"messages": [USER, {"role": "assistant", "content": None}]}], "message 2: 'content' must .*not null"),
    "message without role": ([{"messages": [{"content": "q"}]}], "message 1: no key 'role'; it has 'content'"),
    "messages as text": ([{"messages": "q"}], ":1: 'messages' must be a list, not a string"),
    "messages null": ([{"messages": None}], r"has 'messages', .*; this one has 'messages' \(null\)"),
    "none of the forms": ([{"text": "q"}], "a chat row has 'messages', 'conversations' or 'instruction'"),
    "two forms at once": ([{"messages": chat("q", "a"), "conversations": []}], "has 'messages' and 'conversations'"),
    "tool calls": ([{"messages": [USER, {"role": "assistant", "tool_calls": [1]}]}], "tool calls are not supported"),
    "weight 0": ([{"messages": [USER, {"role": "assistant", "content": "a", "weight": 0}]}], "'weight' must be 1 or absent"),
    "history as a number": ([{"instruction": "q", "output": "a", "history": 3}], "'history' must be a list, not a number"),
    "ShareGPT's unknown role": ([{"conversations": [{"from": "x", "value": "a"}]}], "unknown role 'x' in 'from'"),
    "special token in text": ([{"messages": chat("q", "a<eos>")}], "1 dropped: a special token written in the text"),
}  # fmt: skip

TEMPLATES: dict[str, tuple[str | None, str]] = {
    "template not prefix-stable": (
        CHAT_TEMPLATE.replace("'Assistant: ' + m", "'Assistant: ' + ('!' if loop.last else '') + m"), "not prefix-stable",
    ),
    "template without end token": (CHAT_TEMPLATE.replace(" + eos_token", ""), "no end token behind the assistant's text"),
    "template with markers around all": ("{% generation %}" + CHAT_TEMPLATE + "{% endgeneration %}", "marks every token"),
    "template that is no Jinja": (CHAT_TEMPLATE + "{% endif %}", "is not valid Jinja: line 5: Encountered unknown tag"),
    "template that refuses": ("{{ raise_exception('roles must alternate') }}", "refuses this conversation: roles must"),
    "no template": (None, "chat data need a chat template: .* has none; use the Chat model's directory"),
}  # fmt: skip


def _text(name: str) -> Case:
    file, content, message = TEXT[name]
    return Case(lambda w: w.prepare_pretrain(w.file(file, content)), message)


def _parquet(name: str) -> Case:
    table, message = PARQUET[name]

    def build(w: World) -> list[str]:
        pq.write_table(table, w.path / "a.parquet")
        return w.prepare_pretrain(w.path / "a.parquet")

    return Case(build, message)


def _template(name: str) -> Case:
    template, message = TEMPLATES[name]

    def build(w: World) -> list[str]:
        (w.path / "base").mkdir()
        make_tiny_tokenizer(w.path / "base", template)
        turns = [{"messages": chat("q", "a", "r", "b")}]
        return w.chats(*turns)

    return Case(build, message)


def _spoilt(part: str, file: str, change: Callable, message: str, command: Callable[[World], list[str]]) -> Case:
    """A prepared file edited as JSON or as bytes."""

    def build(w: World) -> list[str]:
        (edit_json if file.endswith(".json") else edit_bytes)(w.copy(part) / file, change)
        return command(w)

    return Case(build, message)


def _train_on_text(w: World) -> list[str]:
    return w.train()


def _train_on_chats(w: World) -> list[str]:
    return w.train(kind="sft")


def _show(w: World) -> list[str]:
    return ["show_samples", str(w.prefix if (w.path / "text").exists() else w.copy("chats"))]


def _samples(table: dict[str, Any]) -> Callable[[bytearray], bytes]:
    """samples.parquet of other content; types as prepare_sft.py writes them unless given as arrays."""

    def change(_: bytearray) -> bytes:
        sink = pa.BufferOutputStream()
        types = {"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.int8())}
        columns = {k: v if isinstance(v, pa.Array) else pa.array(v, types.get(k)) for k, v in table.items()}
        pq.write_table(pa.table(columns), sink)
        return sink.getvalue().to_pybytes()

    return change


def _one_sample(ids: list[int], mask: list[int]) -> tuple[Callable[[bytearray], bytes], dict[str, int]]:
    return _samples({"input_ids": [ids], "loss_mask": [mask]}), {"samples": 1, "tokens": len(ids), "longest": len(ids)}


def _sample_case(ids: list[int], mask: list[int], message: str) -> Case:
    change, numbers = _one_sample(ids, mask)

    def build(w: World) -> list[str]:
        edit_bytes(w.copy("chats") / "samples.parquet", change)
        edit_json(w.copy("chats") / "meta.json", lambda m: m.update(numbers))
        return w.train(kind="sft")

    return Case(build, message)


def _other_tokenizer(w: World) -> list[str]:
    saved = json.loads((w.base / "tokenizer.json").read_text())
    vocabulary = saved["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    Path(w.base / "tokenizer.json").write_text(json.dumps(saved))
    return w.train()


def _set(name: str, value: Any) -> Callable[[dict], None]:
    return lambda content: content.update({name: value})


def _idx(place: int, value: int) -> Callable[[bytearray], None]:
    return lambda b: b.__setitem__(place, value)


HEADER = 9 + 8 + 1 + 8 + 8  # P.idx before the 40 documents' lengths (int32) and places (int64)
CASES: dict[str, Case] = {
    **{name: _text(name) for name in TEXT},
    **{name: _parquet(name) for name in PARQUET},
    **{name: Case(lambda w, rows=rows: w.chats(*rows), message) for name, (rows, message) in CHATS.items()},
    **{name: _template(name) for name in TEMPLATES},
    "truncated .bin": _spoilt("text", "P.bin", lambda b: b[:-2], r"P\.bin must have \d+ bytes .* truncated", _train_on_text),
    "empty .bin": _spoilt("text", "P.bin", lambda b: b"", r"P\.bin is missing or empty", _train_on_text),
    "ids beyond the vocabulary": _spoilt("text", "P.bin", lambda b: b"\xfe" * len(b), "ids lie from 0 .* the model's 320: row", _train_on_text),
    "truncated .idx": _spoilt("text", "P.idx", lambda b: b[:-8], r"P\.idx must have \d+ bytes", _train_on_text),
    ".idx of another format": _spoilt("text", "P.idx", _idx(0, 0), r"P\.idx is damaged or no index", _train_on_text),
    ".idx of another version": _spoilt("text", "P.idx", _idx(9, 2), "version 2 and dtype code 8", _train_on_text),
    ".idx of another dtype": _spoilt("text", "P.idx", _idx(17, 99), "dtype code 99, must be", _train_on_text),
    ".idx with a wrong place": _spoilt("text", "P.idx", _idx(HEADER + 40 * 4, 1), "lengths and places", _train_on_text),
    ".idx with a wrong end": _spoilt("text", "P.idx", _idx(HEADER + 40 * 12 + 8, 9), "lengths and places", _train_on_text),
    "P.json of other text": _spoilt("text", "P.json", _set("documents", 3), "of one preparation: .* 3 documents", _train_on_text),
    "P.json as a list": _spoilt("text", "P.json", lambda c: [1], r"P\.json is not readable", _train_on_text),
    "P.json without eos_id": _spoilt("text", "P.json", lambda c: c.pop("eos_id") and None, "'eos_id'", _train_on_text),
    "P.json of another schema": _spoilt("text", "P.json", _set("schema", 2), "schema 2, this version reads 1", _train_on_text),
    "P.json with text for a size": _spoilt("text", "P.json", _set("vocab_size", "9"), "vocab_size is '9'", _train_on_text),
    "text of another tokenizer": Case(_other_tokenizer, "must be made with the run's tokenizer: .* has hash"),
    "show a truncated .bin": _spoilt("text", "P.bin", lambda b: b[:-2], r"P\.bin must have", _show),
    "show a broken P.json": _spoilt("text", "P.json", lambda c: "x", r"P\.json is not readable", _show),
    "show nothing": Case(lambda w: ["show_samples", str(w.path)], "nothing prepared at"),
    "show chats without tokenizer": _spoilt("chats", "meta.json", _set("tokenizer", "/no"), "'/no' has none", _show),
    "meta.json without longest": _spoilt("chats", "meta.json", lambda m: m.pop("longest") and None, "'longest'", _train_on_chats),
    "meta.json with text for a size": _spoilt("chats", "meta.json", _set("longest", "9"), "longest is '9'", _train_on_chats),
    "meta.json of other samples": _spoilt("chats", "meta.json", _set("samples", 9), "disagree: 9 samples", _train_on_chats),
    "chats of another template": _spoilt("chats", "meta.json", _set("template_sha256", "0" * 64), "the run's template", _train_on_chats),
    "truncated samples": _spoilt("chats", "samples.parquet", lambda b: b[:-9], r"cannot read .*samples\.parquet", _train_on_chats),
    "samples without masks": _spoilt("chats", "samples.parquet", _samples({"input_ids": [[1, 2]]}), "has the columns input_ids", _train_on_chats),
    "samples of floats": _spoilt(
        "chats", "samples.parquet", _samples({"input_ids": pa.array([[1.0, 2.0]]), "loss_mask": [[0, 1]]}),
        "has the columns input_ids: list<.*double>", _train_on_chats,
    ),
    "samples that are null": _spoilt(
        "chats", "samples.parquet", _samples({"input_ids": [None], "loss_mask": [None]}), "rows without a value", _train_on_chats,
    ),
    "a mask of another length": _spoilt(
        "chats", "samples.parquet", _samples({"input_ids": [[1, 2]], "loss_mask": [[1]]}), "mask is not as long", _train_on_chats,
    ),
    "a token beyond the vocabulary": _sample_case([1, 5, 999], [0, 1, 1], "ids lie from 0 to below vocab_size 259: not so"),
    "a sample of one token": _sample_case([1], [1], "samples have 2 to `longest` tokens: not so in"),
    "a mask of 2": _sample_case([1, 5, 2], [0, 2, 1], "a loss mask is of 0 and 1: not so in"),
    "a sample without target": _sample_case([1, 5, 2], [0, 0, 0], "every sample has a learned token: not so in"),
}  # fmt: skip
