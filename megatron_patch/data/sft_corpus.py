"""Chat files -> `DIR/samples.parquet` (input_ids, loss_mask) and `DIR/meta.json`; one conversation is one "
"sample."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from megatron_patch.data.chat import ChatEncoder, EncodedChat, RowRejected
from megatron_patch.data.conversations import parse_conversation
from megatron_patch.data.counts import RowCounts, print_table, table_lines
from megatron_patch.data.readers import Chunk, check_inputs, describe_inputs, parse_row, read_chunks
from megatron_patch.data.tokenizer import load_tokenizer, template_sha256, tokenizer_sha256, vocabulary_size
from megatron_patch.data.workers import ordered_map
from megatron_patch.errors import UserError
from megatron_patch.io.publish import atomic_directory, require_empty

SCHEMA = 1
SAMPLES, META = "samples.parquet", "meta.json"
TOO_LONG = "longer than --seq-length"
NO_TARGET = "no supervised token left after truncation"


@dataclass
class SftCorpusSettings:
    """Turn chats into token ids and loss masks for supervised fine-tuning."""

    input: list[str]
    """Files to read: .jsonl, .jsonl.gz, .jsonl.zst or .parquet; rows in OpenAI's, ShareGPT's or Alpaca's form."""
    tokenizer: str
    """Directory with the tokenizer and its chat template: the base model's."""
    seq_length: int
    """Most tokens a sample may have, BOS and end token included."""
    output: str
    """Directory to write; must be empty or absent."""
    overlong: Literal["drop", "truncate"] = "drop"
    """What becomes of a longer sample; truncation never leaves one without a supervised token."""
    workers: int = 1
    """Processes that tokenise. The result does not depend on their number."""
    strict: bool = False
    """Stop at the first row that would be dropped."""
    trust_remote_code: bool = False
    """Let Python code in the tokenizer's directory run."""


@dataclass
class _Work:
    """What every worker needs."""

    encoder: ChatEncoder
    seq_length: int
    truncate: bool
    strict: bool


@dataclass
class _Samples:
    """A chunk's samples."""

    chats: list[EncodedChat] = field(default_factory=list)
    counts: RowCounts = field(default_factory=RowCounts)
    truncated: int = 0
    progress: float = 0.0


def prepare_sft(settings: SftCorpusSettings) -> dict[str, Any]:
    """Run the preparation; prints a progress bar (stderr) and a table of counts (stdout).

    Returns:
        What was written to `meta.json`.

    Raises:
        UserError: an input that cannot be read, a bad row (named `file:line`), a chat template that does not tell which
            tokens are the assistant's, an output directory that is not empty, or nothing left.
    """
    check_inputs(settings.input)
    if settings.seq_length < 2:
        raise UserError(f"--seq-length must be at least 2: {settings.seq_length}; give the run's sequence length")
    output = Path(settings.output)
    require_empty(output)
    tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
    encoder = ChatEncoder(tokenizer)
    work = _Work(encoder, settings.seq_length, settings.overlong == "truncate", settings.strict)
    with atomic_directory(output) as unfinished:
        counts, numbers = _write_samples(settings, work, unfinished / SAMPLES)
        counts.refuse_nothing_kept("sample", "give chats with an assistant's answer, or a larger --seq-length")
        meta = {
            "schema": SCHEMA,
            "samples": counts.kept,
            **numbers,
            "rows": counts.rows,
            "blank_lines": counts.blank_lines,
            "dropped": dict(sorted(counts.dropped.items())),
            "overlong": settings.overlong,
            "seq_length": settings.seq_length,
            "assistant_tokens_by": encoder.method,
            "tokenizer": str(Path(settings.tokenizer).resolve()),
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "template_sha256": template_sha256(tokenizer),
            "vocab_size": vocabulary_size(tokenizer),
            "bos_id": tokenizer.bos_token_id,
            "eos_id": tokenizer.eos_token_id,
            "inputs": describe_inputs(settings.input),
        }
        text = json.dumps(meta, indent=2, ensure_ascii=False) + "\n"
        (unfinished / META).write_text(text, encoding="utf-8")
    extra = [(name.replace("_", " "), number) for name, number in numbers.items()]
    print_table(str(output), [*table_lines(counts, "samples"), *extra])
    return meta


def _write_samples(settings: SftCorpusSettings, work: _Work, path: Path) -> tuple[RowCounts, dict[str, int]]:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8()))])
    counts, tokens, supervised, longest, truncated = RowCounts(), 0, 0, 0, 0
    with ParquetWriter(path, schema, compression="zstd") as writer:
        for chunk in _with_progress(settings, work):
            counts.merge(chunk.counts)
            truncated += chunk.truncated
            if not chunk.chats:
                continue
            ids, masks = [chat.input_ids for chat in chunk.chats], [chat.loss_mask for chat in chunk.chats]
            writer.write_table(pa.table({"input_ids": ids, "loss_mask": masks}, schema=schema))
            tokens += sum(map(len, ids))
            supervised += sum(map(sum, masks))
            longest = max(longest, *map(len, ids))
    numbers = {"tokens": tokens, "supervised_tokens": supervised, "longest": longest, "truncated": truncated}
    return counts, numbers


def _with_progress(settings: SftCorpusSettings, work: _Work) -> Iterator[_Samples]:
    chunks = itertools.chain.from_iterable(map(read_chunks, settings.input))
    total = sum(Path(path).stat().st_size for path in settings.input)
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenise") as bar:
        for result in ordered_map(_encode, chunks, context=work, workers=settings.workers):
            bar.update(result.progress)
            yield result


def _encode(work: _Work, chunk: Chunk) -> _Samples:
    result = _Samples(progress=chunk.progress)
    for offset in range(len(chunk.rows)):
        row = parse_row(chunk, offset)
        if row is None:
            result.counts.blank_lines += 1
            continue
        result.counts.rows += 1
        where = chunk.where(offset)
        try:
            chat = work.encoder.encode(parse_conversation(row, where), where)
            fitted = _fit(chat, work.seq_length, work.truncate)
        except RowRejected as reason:
            result.counts.drop(str(reason), where, work.strict)
            continue
        if fitted is not chat and work.strict:
            raise UserError(
                f"{where}: {len(chat.input_ids)} tokens exceed --seq-length {work.seq_length}, and --strict "
                "truncates no row; raise --seq-length or leave out --strict"
            )
        result.truncated += fitted is not chat
        result.chats.append(fitted)
    result.counts.kept = len(result.chats)
    return result


def _fit(chat: EncodedChat, seq_length: int, truncate: bool) -> EncodedChat:
    """The chat itself if it is short enough, else its first `seq_length` tokens."""
    if len(chat.input_ids) <= seq_length:
        return chat
    if not truncate:
        raise RowRejected(TOO_LONG)
    if not any(chat.loss_mask[:seq_length]):
        raise RowRejected(NO_TARGET)
    return EncodedChat(chat.input_ids[:seq_length], chat.loss_mask[:seq_length])
