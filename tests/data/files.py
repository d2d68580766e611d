"""Small inputs and runs that the tests of this room share."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_patch.data.pretrain_corpus import PretrainCorpusSettings, prepare_pretrain
from megatron_patch.data.sft_corpus import SftCorpusSettings, prepare_sft


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_as(path: Path, rows: list[dict]) -> Path:
    """Write rows in the form that the extension names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(data))
    elif path.name.endswith(".zst"):
        path.write_bytes(pa.compress(data, codec="zstd", asbytes=True))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    else:
        path.write_bytes(data)
    return path


def pretrain(input: list[Path], tokenizer: Path, prefix: Path, **settings: Any) -> dict[str, Any]:
    return prepare_pretrain(PretrainCorpusSettings([str(p) for p in input], str(tokenizer), str(prefix), **settings))


def sft(input: list[Path], tokenizer: Path, output: Path, seq_length: int = 512, **settings: Any) -> dict[str, Any]:
    return prepare_sft(SftCorpusSettings([str(p) for p in input], str(tokenizer), seq_length, str(output), **settings))


def chat(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    """Alternating user and assistant messages."""
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
