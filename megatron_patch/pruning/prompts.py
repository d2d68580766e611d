"""Data to observe or score: rows of JSON lines -> token ids, as a rollout would see them."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from megatron_patch.errors import UserError
from megatron_patch.io.strict_json import parse_json
from megatron_patch.pruning.config_json import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT_KEY, CHAT_KEY = "text", "messages"


@dataclass
class Encoded:
    """A file's rows as tokens.

    Attributes:
        rows: token ids of each row.
        cut: rows that were longer than max_length and lost their end.
        left_out: chats that were longer and should have been answered: their end is the question.
    """

    rows: list[Sequence[int]]
    cut: int = 0
    left_out: int = 0


def encode_file(
    tokenizer: "PreTrainedTokenizerBase",
    path: str | Path,
    *,
    text_key: str = TEXT_KEY,
    chat: bool = False,
    max_length: int = 2048,
    for_reply: bool = False,
    shard: tuple[int, int] = (0, 1),
) -> Encoded:
    """Tokens of a file's rows.

    Args:
        path: JSON lines. Blank lines are no rows.
        text_key: key of a row's text, which gets a BOS in front where the tokenizer has one.
        chat: rows are `{"messages": [...]}` and go through the chat template instead.
        max_length: most tokens of a row. Longer ones are cut; in a chat that shall be answered the end is the question,
            so that such rows are left out.
        for_reply: end chats where the assistant would answer; a final assistant message is taken off.
        shard: (i, n): every n-th row from row i, for n workers on one file.

    Raises:
        UserError: no such file, a row that is malformed (by file and line), or no row left.
    """
    found = Encoded([])
    number = -1
    with tqdm(unit="row", desc=f"encode {Path(path).name}", leave=False) as bar:
        for where, row in _rows(path):
            number += 1
            bar.update()
            if number % shard[1] != shard[0]:
                continue
            ids = _chat(tokenizer, row, where, for_reply) if chat else _text(tokenizer, row, where, text_key)
            if len(ids) > max_length:
                if chat and for_reply:
                    found.left_out += 1
                    continue
                found.cut += 1
            found.rows.append(array("i", ids[:max_length]))
    if not found.rows:
        kept = f" that --max-length {max_length} and --shard {shard[0]}/{shard[1]} leave" if number >= 0 else ""
        raise UserError(f"data must have rows{kept}: {path} has none; give another file")
    return found


def check_vocabulary(encoded: Iterable[Encoded], directory: str | Path) -> None:
    """Refuse token ids that the model in `directory` has no row for.

    Raises:
        UserError: the tokenizer is another model's.
    """
    size = read_config(Path(directory)).get("vocab_size")
    largest = max(max(row) for part in encoded for row in part.rows)
    if isinstance(size, int) and largest >= size:
        raise UserError(
            f"token ids must be below vocab_size: the data have id {largest}, {directory} has {size} rows; the tokenizer is "
            "not this model's, copy the right one"
        )


def _rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, row) of each line that is not blank."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = parse_json(line)
                except ValueError as error:
                    raise UserError(f"{path}:{number}: a line must be a JSON object: {error}; mend it") from None
                if not isinstance(row, dict):
                    raise UserError(f"{path}:{number}: a line must be a JSON object: it is {type(row).__name__}; mend it")
                yield f"{path}:{number}", row
    except UnicodeDecodeError as error:
        raise UserError(f"data must be UTF-8: {path}: {error}; convert it") from None


def _text(tokenizer: "PreTrainedTokenizerBase", row: dict[str, Any], where: str, key: str) -> list[int]:
    if key in row and not (isinstance(row[key], str) and row[key]):
        found = "an empty one" if row[key] == "" else f"a {type(row[key]).__name__}"
        raise UserError(f"{where}: {key!r} must hold a text: it holds {found}; mend or drop the row")
    if key not in row:
        raise UserError(
            f"{where}: {key!r} must be a text: the row has {', '.join(map(repr, row)) or 'nothing'}; give --text-key, or "
            "--chat for messages"
        )
    # Names of special tokens in a text are ordinary characters.
    ids = tokenizer(row[key], add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]


def _chat(tokenizer: "PreTrainedTokenizerBase", row: dict[str, Any], where: str, for_reply: bool) -> list[int]:
    messages = row.get(CHAT_KEY)
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise UserError(f"{where}: {CHAT_KEY!r} must be a list of messages with roles; mend the row, or leave out --chat")
    if for_reply and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=for_reply)
    except Exception as error:  # what a template raises is its own choice
        raise UserError(f"{where}: the chat template refuses the row: {error}; mend it") from None
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]
