"""The suite: tasks with exact answers and held-out text, in one directory, checked as a whole before a model is loaded.

suite.json     {"schema": 1, "name": "demo",
                "tasks": [{"name": "lookup", "file": "lookup.jsonl", "metric": "exact_match", "chance": 0.0625,
                           "taught_to_base": true, "description": "..."}],
                "perplexity": {"file": "heldout.jsonl", "text_key": "text", "max_length": 256}}
lookup.jsonl   {"messages": [{"role": "user", "content": "..."}], "answer": "..."}   a row each
heldout.jsonl  {"text": "..."}                                                       a document each
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.data.conversations import Message, parse_conversation
from megatron_patch.data.readers import check_inputs, missing_key, parse_row, read_chunks, type_name
from megatron_patch.errors import UserError
from megatron_patch.io.strict_json import read_json

SCHEMA = 1
SUITE_FILE = "suite.json"
EXACT_MATCH = "exact_match"


@dataclass(frozen=True)
class Row:
    """One scored row: a conversation that ends with a question, and the answer expected."""

    messages: list[Message]
    answer: str
    where: str  # file:line


@dataclass(frozen=True)
class Task:
    """One task. `chance`: the score of a blind guess. `taught_to_base`: whether the base is expected to solve it."""

    name: str
    metric: str
    chance: float
    taught_to_base: bool
    description: str
    rows: list[Row]


@dataclass(frozen=True)
class HeldOut:
    """Held-out documents, each cut to `max_length` tokens, BOS included."""

    documents: list[str]
    max_length: int


@dataclass(frozen=True)
class Suite:
    """What a model is scored on."""

    name: str
    tasks: list[Task]
    held_out: HeldOut


def read_suite(directory: str | Path, limit: int | None = None) -> Suite:
    """Read a suite and check all of it.

    Args:
        directory: holds suite.json and the files that it names.
        limit: keep only the first so many rows of each task and held-out documents; the others are checked all the same.

    Raises:
        UserError: anything malformed, named by key, or by file and line.
    """
    directory = Path(directory)
    if limit is not None and limit < 1:
        raise UserError(f"--limit must be 1 or more: {limit}; leave it out to score everything")
    content, where = _read_json(directory / SUITE_FILE), str(directory / SUITE_FILE)
    _check_keys(content, where, ("schema", "name", "tasks", "perplexity"))
    if content["schema"] != SCHEMA or isinstance(content["schema"], bool):
        raise UserError(
            f"{where}: schema must be {SCHEMA}: {content['schema']!r}; use a suite of this release's format"
        )
    name = _text(content, "name", where)
    entries = content["tasks"]
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{where}: tasks must be a list with at least one task; add one")
    tasks = [_read_task(entry, directory, f"{where}: task {i}", limit) for i, entry in enumerate(entries, 1)]
    twice = sorted({task.name for task in tasks if [other.name for other in tasks].count(task.name) > 1})
    if twice:
        raise UserError(f"{where}: task names must differ: {', '.join(twice)} stands twice; rename one")
    return Suite(name, tasks, _read_held_out(content["perplexity"], directory, f"{where}: perplexity", limit))


def _read_task(entry: Any, directory: Path, where: str, limit: int | None) -> Task:
    _check_keys(entry, where, ("name", "file", "metric", "chance", "taught_to_base"), optional=("description",))
    name = _text(entry, "name", where)
    where = f"{where} ({name})"
    if entry["metric"] != EXACT_MATCH:
        raise UserError(f"{where}: metric must be {EXACT_MATCH!r}: {entry['metric']!r}; no other is implemented")
    chance = entry["chance"]
    if isinstance(chance, bool) or not isinstance(chance, (int, float)) or not 0 <= chance < 1:
        raise UserError(f"{where}: chance must be a number from 0 to below 1: {chance!r}; give a blind guess's score")
    if not isinstance(entry["taught_to_base"], bool):
        raise UserError(f"{where}: taught_to_base must be true or false: {entry['taught_to_base']!r}")
    description = entry.get("description", "")
    if not isinstance(description, str):
        raise UserError(f"{where}: description must be a string, not {type_name(description)}")
    rows = [_read_row(row, place) for row, place in _rows(_file(entry, directory, where))]
    return Task(name, EXACT_MATCH, float(chance), entry["taught_to_base"], description, rows[:limit])


def _read_row(row: dict[str, Any], where: str) -> Row:
    for key in ("messages", "answer"):
        if key not in row:
            raise missing_key(where, key, sorted(row))
    messages = parse_conversation({"messages": row["messages"]}, where)
    if not messages or messages[-1]["role"] != "user":
        last = repr(messages[-1]["role"]) if messages else "nothing"
        raise UserError(f"{where}: messages must end with the user's question: they end with {last}; mend the row")
    answer = row["answer"]
    if not isinstance(answer, str) or not answer.strip():
        raise UserError(f"{where}: answer must be a string that is not blank: {answer!r}; mend the row")
    return Row(messages, answer, where)


def _read_held_out(entry: Any, directory: Path, where: str, limit: int | None) -> HeldOut:
    _check_keys(entry, where, ("file", "text_key", "max_length"))
    key, max_length = _text(entry, "text_key", where), entry["max_length"]
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
        raise UserError(f"{where}: max_length must be a whole number of 2 or more tokens: {max_length!r}")
    documents = []
    for row, place in _rows(_file(entry, directory, where)):
        if key not in row:
            raise missing_key(place, key, sorted(row))
        if not isinstance(row[key], str) or not row[key]:
            raise UserError(f"{place}: {key!r} must be a string that is not empty: {row[key]!r}; mend the row")
        documents.append(row[key])
    return HeldOut(documents[:limit], max_length)


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Rows of a file with their `file:line`; blank lines are no rows."""
    check_inputs([path])
    found = False
    for chunk in read_chunks(path):
        for offset in range(len(chunk.rows)):
            row = parse_row(chunk, offset)
            if row is not None:
                found = True
                yield row, chunk.where(offset)
    if not found:
        raise UserError(f"a suite's files must have rows: {path} has only blank lines; write it again")


def _file(entry: dict[str, Any], directory: Path, where: str) -> Path:
    name = _text(entry, "file", where)
    if Path(name).name != name or name in (".", ".."):
        raise UserError(f"{where}: file must be a plain name in the suite's directory: {name!r}; move the file there")
    return directory / name


def _read_json(path: Path) -> Any:
    try:
        return read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"a suite is a directory with a {SUITE_FILE}: {str(path.parent)!r} has none; give such a directory"
        ) from None
    except ValueError as error:
        raise UserError(f"{SUITE_FILE} must be JSON: {path}: {error}; mend it") from None


def _check_keys(entry: Any, where: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Every required key is there and no unknown one is: a misspelt optional key must not pass in silence."""
    if not isinstance(entry, dict):
        raise UserError(f"{where}: must be an object, not {type_name(entry)}; mend it")
    for key in entry:
        if key not in required + optional:
            close = difflib.get_close_matches(str(key), required + optional, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(f"{where}: unknown key {key!r}; {hint}known are {', '.join(required + optional)}")
    for key in required:
        if key not in entry:
            raise missing_key(where, key, sorted(entry))


def _text(entry: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(entry[key], str) or not entry[key].strip():
        raise UserError(f"{where}: {key} must be a string that is not blank: {entry[key]!r}; mend it")
    return entry[key]
