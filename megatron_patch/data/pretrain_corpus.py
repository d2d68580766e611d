"""Text files -> `P.bin`, `P.idx` (megatron-core's IndexedDataset) and `P.json`: each document is BOS + tokens + "
"EOS."""

import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_patch.data.counts import RowCounts, print_table, table_lines
from megatron_patch.data.readers import (
    Chunk,
    check_inputs,
    describe_inputs,
    missing_key,
    parse_row,
    read_chunks,
    type_name,
)
from megatron_patch.data.tokenizer import encode_plain, load_tokenizer, tokenizer_sha256, vocabulary_size
from megatron_patch.data.workers import ordered_map
from megatron_patch.errors import UserError

SCHEMA = 1
EMPTY, BAD_UNICODE = "empty text", "text that is not valid Unicode"


@dataclass
class PretrainCorpusSettings:
    """Tokenise text files for pretraining."""

    input: list[str]
    """Files to read: .jsonl, .jsonl.gz, .jsonl.zst or .parquet, in this order."""
    tokenizer: str
    """Directory with the tokenizer: the base model's."""
    output_prefix: str
    """P of the files P.bin, P.idx and P.json, which must not exist yet."""
    text_key: str = "text"
    """Key (column) of a row that holds its text."""
    workers: int = 1
    """Processes that tokenise. The result does not depend on their number."""
    strict: bool = False
    """Stop at the first row that would be dropped (empty text, invalid Unicode)."""
    trust_remote_code: bool = False
    """Let Python code in the tokenizer's directory run."""


@dataclass
class _Work:
    """What every worker needs."""

    tokenizer: Any
    text_key: str
    strict: bool


@dataclass
class _Documents:
    """A chunk's documents laid end to end, and how far its reading went."""

    tokens: np.ndarray  # int32 [sum of lengths]
    lengths: list[int]
    progress: float
    counts: RowCounts = field(default_factory=RowCounts)


def prepare_pretrain(settings: PretrainCorpusSettings) -> dict[str, Any]:
    """Run the preparation; prints a progress bar (stderr) and a table of counts (stdout).

    Returns:
        What was written to `P.json`.

    Raises:
        UserError: an input that cannot be read, a bad row (named `file:line`), existing output, or nothing left.
    """
    check_inputs(settings.input)
    prefix = Path(settings.output_prefix)
    if settings.output_prefix.endswith(("/", "/.", "/..")) or prefix.name in ("", ".."):
        raise UserError(
            f"--output-prefix ends in the name of P.bin: {settings.output_prefix!r} names a folder; append a name to it"
        )
    for suffix in (".bin", ".idx", ".json"):
        if Path(f"{prefix}{suffix}").exists():
            raise UserError(
                f"the output must not exist yet: {prefix}{suffix} does; remove it or choose another --output-prefix"
            )
    tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
    work = _Work(tokenizer, settings.text_key, settings.strict)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{prefix.name}.", dir=prefix.parent) as scratch:
        unfinished = Path(scratch) / "P"
        counts, tokens = _write_documents(settings, work, unfinished)
        counts.refuse_nothing_kept("document", "give an input with text under --text-key")
        report = {
            "schema": SCHEMA,
            "documents": counts.kept,
            "tokens": tokens,
            "rows": counts.rows,
            "blank_lines": counts.blank_lines,
            "dropped": dict(sorted(counts.dropped.items())),
            "text_key": settings.text_key,
            "tokenizer": str(Path(settings.tokenizer).resolve()),
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "vocab_size": vocabulary_size(tokenizer),
            "bos_id": tokenizer.bos_token_id,
            "eos_id": tokenizer.eos_token_id,
            "inputs": describe_inputs(settings.input),
        }
        Path(f"{unfinished}.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for suffix in (".bin", ".idx", ".json"):  # the report last: whoever finds it finds the data complete
            os.replace(f"{unfinished}{suffix}", f"{prefix}{suffix}")
    print_table(str(prefix), [*table_lines(counts, "documents"), ("tokens", tokens)])
    return report


def _write_documents(settings: PretrainCorpusSettings, work: _Work, prefix: Path) -> tuple[RowCounts, int]:
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocabulary_size(work.tokenizer)))
    counts, tokens = RowCounts(), 0
    for chunk in _with_progress(settings, work):
        counts.merge(chunk.counts)
        tokens += chunk.tokens.size
        # Each document is one sequence of the index: sequences are what megatron-core shuffles and splits by.
        for ids in np.split(chunk.tokens, np.cumsum(chunk.lengths)[:-1]) if chunk.lengths else ():
            builder.add_item(torch.from_numpy(ids))
            builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return counts, tokens


def _with_progress(settings: PretrainCorpusSettings, work: _Work) -> Iterator[_Documents]:
    chunks = itertools.chain.from_iterable(read_chunks(path, settings.text_key) for path in settings.input)
    total = sum(Path(path).stat().st_size for path in settings.input)
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenise") as bar:
        for result in ordered_map(_tokenise, chunks, context=work, workers=settings.workers):
            bar.update(result.progress)
            yield result


def _tokenise(work: _Work, chunk: Chunk) -> _Documents:
    counts, texts = RowCounts(), []
    for offset in range(len(chunk.rows)):
        row = parse_row(chunk, offset)
        if row is None:
            counts.blank_lines += 1
            continue
        counts.rows += 1
        text = _text(row, work.text_key, chunk.where(offset))
        if not text.strip():
            counts.drop(EMPTY, chunk.where(offset), work.strict)
        elif not is_unicode(text):
            counts.drop(BAD_UNICODE, chunk.where(offset), work.strict)
        else:
            texts.append(text)
    counts.kept = len(texts)
    bos, eos = work.tokenizer.bos_token_id, work.tokenizer.eos_token_id
    documents = [[bos, *ids, eos] for ids in encode_plain(work.tokenizer, texts)] if texts else []
    tokens = np.fromiter(itertools.chain.from_iterable(documents), dtype=np.int32)
    return _Documents(tokens, [len(ids) for ids in documents], chunk.progress, counts)


def _text(row: dict[str, Any], key: str, where: str) -> str:
    if key not in row:
        raise missing_key(where, key, list(row))
    text = row[key]
    if text is None:  # how parquet and pandas write "no text"; counted as empty
        return ""
    if not isinstance(text, str):
        raise UserError(
            f"{where}: {key!r} must be a string, not {type_name(text)}; choose another --text-key or mend the row"
        )
    return text


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded: JSON's \\ud800 alone, half of a surrogate pair, cannot, and tokenizers "
    "raise."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
