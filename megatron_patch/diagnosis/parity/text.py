"""The tokens that both sides read: documents of a text file, laid end to end in a pack."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_patch.data.readers import EXTENSIONS, check_inputs, parse_row, read_chunks
from megatron_patch.data.tokenizer import encode_plain, load_tokenizer
from megatron_patch.errors import UserError

LEAST_TOKENS = 2


@dataclass(frozen=True)
class Pack:
    """Tokens int64 [T] and document boundaries int32 [n + 1]."""

    tokens: Tensor
    cu_seqlens: Tensor


def read_pack(file: Path, tokenizer_directory: Path, length: int, documents: int = 1, text_key: str = "text") -> Pack:
    """The first `length` tokens of a file, as `documents` documents of about equal length.

    A JSONL or parquet file gives its rows one after the other, any other file is one text. Each of the pack's documents
    starts with BOS and takes the next tokens of the file.

    Args:
        file: as for the data scripts (.jsonl, .parquet, ...), or plain text in UTF-8.
        tokenizer_directory: Hugging Face directory.
        length: tokens of the pack.
        documents: in the pack.
        text_key: of JSONL rows.

    Raises:
        UserError: the file cannot be read, or holds fewer tokens.
    """
    if documents < 1:
        raise UserError(f"--documents must be 1 or more: {documents}; raise it")
    if length < LEAST_TOKENS * documents:
        raise UserError(
            f"a document has {LEAST_TOKENS} tokens or more: --seq-length {length} does not hold --documents {documents}; raise it"
        )
    tokenizer = load_tokenizer(tokenizer_directory)
    lengths = [length // documents + (i < length % documents) for i in range(documents)]
    wanted = length - documents
    ids: list[int] = []
    for text in _texts(file, text_key):
        ids += encode_plain(tokenizer, [text])[0]
        if len(ids) >= wanted:
            break
    if len(ids) < wanted:
        raise UserError(
            f"--text must hold --seq-length tokens: {file} has {len(ids)}, {wanted} are needed; give more text or a smaller "
            "--seq-length"
        )
    pieces, start = [], 0
    for size in lengths:
        pieces.append([tokenizer.bos_token_id, *ids[start : start + size - 1]])
        start += size - 1
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return Pack(torch.tensor([token for piece in pieces for token in piece]), bounds)


def token_texts(tokens: Tensor, tokenizer_directory: Path) -> list[str]:
    """What each token stands for."""
    tokenizer = load_tokenizer(tokenizer_directory)
    return [tokenizer.decode([token]) for token in tokens.tolist()]


def _texts(file: Path, text_key: str) -> Iterator[str]:
    if file.name.endswith(EXTENSIONS):
        check_inputs([file])
        for chunk in read_chunks(file):
            for offset in range(len(chunk.rows)):
                row = parse_row(chunk, offset)
                if row is not None and isinstance(row.get(text_key), str):
                    yield row[text_key]
                elif row is not None:
                    raise UserError(f"{chunk.where(offset)}: a row must hold text under {text_key!r}: name its key with --text-key")
        return
    try:
        yield file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text must be a file of text in UTF-8 or .jsonl: {file}: {error}; give another") from None
