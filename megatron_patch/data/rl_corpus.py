"""Questions with exact answers -> `train.parquet`, `validation.parquet` (verl's RL rows) and `sft.parquet` (verl's chat rows).

Either rows of files or arithmetic that is made on the spot. Prompts stay chats: verl renders and tokenises them itself.
"""

import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_patch.data.conversations import Message, parse_conversation
from megatron_patch.data.counts import RowCounts, print_table, table_lines
from megatron_patch.data.readers import check_inputs, describe_inputs, parse_row, read_chunks
from megatron_patch.errors import UserError
from megatron_patch.io.publish import atomic_directory, require_empty

SCHEMA = 1
TRAIN, VALIDATION, SFT, META = "train.parquet", "validation.parquet", "sft.parquet", "meta.json"
ASK = "{}\nWork it out, then end with one line: Answer: <number>"
NO_ANSWER = "no 'answer', or an empty one"
NO_NUMBER = "'answer' is not a number"
NO_QUESTION = "the conversation does not end with a question of the user"
REPEATED = "the question came before"


@dataclass
class RlCorpusSettings:
    """Make the data of GRPO: questions whose answers are checked exactly."""

    output: str
    """Directory to write; must be empty or absent."""
    input: list[str] = field(default_factory=list)
    """Files of rows {"messages": [..., user], "answer": text} or {"question": text, "answer": text}; none: arithmetic is made."""
    answer: Literal["exact", "number"] = "exact"
    """How rows of --input are checked: the first line of the response, or the number after "Answer:" (asked for in the prompt)."""
    rows: int = 4096
    """How many arithmetic questions are made where no --input is given."""
    digits: int = 2
    """Digits of their numbers: how hard they are. GRPO learns nothing from questions that are always, or never, answered."""
    validation_share: float = 0.05
    """Share of the questions that is kept for validation, chosen by their content."""
    seed: int = 1234
    """Of the arithmetic."""
    strict: bool = False
    """Stop at the first row that would be dropped."""


@dataclass(frozen=True)
class Question:
    """A chat that ends with the user's question, and its answer."""

    messages: tuple[tuple[str, str], ...]  # (role, content)
    answer: str
    source: str  # the answer form, as the reward function knows it

    @property
    def prompt(self) -> list[Message]:
        return [{"role": role, "content": content} for role, content in self.messages]

    def for_validation(self, share: float) -> bool:
        return zlib.crc32(json.dumps(self.messages).encode()) / 2**32 < share


def prepare_rl(settings: RlCorpusSettings) -> dict[str, Any]:
    """Write the directory and print a table of counts.

    Returns:
        What was written to `meta.json`.

    Raises:
        UserError: an input that cannot be read, a bad row (named `file:line`), a setting out of range, or nothing left for
            training or validation.
    """
    _check(settings)
    output = Path(settings.output)
    require_empty(output)
    counts = RowCounts()
    questions = list(_from_files(settings, counts) if settings.input else _arithmetic(settings, counts))
    counts.kept = len(questions)
    counts.refuse_nothing_kept("question", "give rows with a question and its answer")
    held_out = [question for question in questions if question.for_validation(settings.validation_share)]
    training = [question for question in questions if not question.for_validation(settings.validation_share)]
    for name, part in (("training", training), ("validation", held_out)):
        if not part:
            raise UserError(
                f"there must be questions for {name}: of {len(questions)}, --validation-share {settings.validation_share} leaves "
                "none; give more rows or another share"
            )
    with atomic_directory(output) as unfinished:
        _write_rl(unfinished / TRAIN, training, "train")
        _write_rl(unfinished / VALIDATION, held_out, "validation")
        _write_sft(unfinished / SFT, training)
        meta = {
            "schema": SCHEMA,
            "training": len(training),
            "validation": len(held_out),
            "rows": counts.rows,
            "blank_lines": counts.blank_lines,
            "dropped": dict(sorted(counts.dropped.items())),
            "data_source": questions[0].source,
            "inputs": describe_inputs(settings.input),
        }
        (unfinished / META).write_text(json.dumps(meta, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    lines = [*table_lines(counts, "questions"), ("for training", len(training)), ("for validation", len(held_out))]
    print_table(str(output), lines)
    return meta


def _check(settings: RlCorpusSettings) -> None:
    if settings.input:
        check_inputs(settings.input)
    if settings.rows < 2:
        raise UserError(f"--rows must be at least 2: {settings.rows}; give the number of questions")
    if not 1 <= settings.digits <= 9:
        raise UserError(f"--digits must be 1 to 9: {settings.digits}; 2 is a fair start")
    if not settings.input and settings.rows > 2 * 9 * 10 ** (2 * settings.digits - 1):
        raise UserError(
            f"--rows must leave questions to draw: there are not {settings.rows} different ones of --digits {settings.digits}; give "
            "fewer rows or more digits"
        )
    if not 0 < settings.validation_share < 1:
        raise UserError(f"--validation-share must lie between 0 and 1: {settings.validation_share}; e.g. 0.05")


def _arithmetic(settings: RlCorpusSettings, counts: RowCounts) -> Iterator[Question]:
    """Sums and differences of two numbers, each question once."""
    rng, seen = random.Random(settings.seed), set()
    low, high = 10 ** (settings.digits - 1), 10**settings.digits - 1
    while len(seen) < settings.rows:
        a, b, sign = rng.randint(low, high), rng.randint(0, high), rng.choice("+-")
        if (a, b, sign) in seen:
            continue
        seen.add((a, b, sign))
        counts.rows += 1
        answer = a + b if sign == "+" else a - b
        yield Question((("user", ASK.format(f"What is {a} {sign} {b}?")),), str(answer), "upcycle/number")


def _from_files(settings: RlCorpusSettings, counts: RowCounts) -> Iterator[Question]:
    seen: set[Question] = set()
    for path in settings.input:
        for chunk in read_chunks(path):
            for offset in range(len(chunk.rows)):
                row, where = parse_row(chunk, offset), chunk.where(offset)
                if row is None:
                    counts.blank_lines += 1
                    continue
                counts.rows += 1
                question = _question(row, where, settings.answer)
                reason = question if isinstance(question, str) else REPEATED if question in seen else None
                if reason is not None:
                    counts.drop(reason, where, settings.strict)
                    continue
                seen.add(question)
                yield question


def _question(row: dict[str, Any], where: str, form: str) -> Question | str:
    """The row's question, or why it is dropped."""
    if isinstance(row.get("question"), str):
        row = row | {"messages": [{"role": "user", "content": row["question"]}]}
    messages = parse_conversation({"messages": row["messages"]} if "messages" in row else row, where)
    answer = row.get("answer")
    if not isinstance(answer, str | int) or isinstance(answer, bool) or not str(answer).strip():
        return NO_ANSWER
    if not messages or messages[-1]["role"] != "user":
        return NO_QUESTION
    if form == "number":
        try:
            float(str(answer).replace(",", ""))
        except ValueError:
            return NO_NUMBER
        messages[-1]["content"] = ASK.format(messages[-1]["content"])
    turns = tuple((message["role"], message["content"]) for message in messages)
    return Question(turns, str(answer).strip(), f"upcycle/{form}")


def _write_rl(path: Path, questions: list[Question], split: str) -> None:
    """verl's columns: data_source, prompt, ability, reward_model, extra_info."""
    rows = [
        {
            "data_source": question.source,
            "prompt": question.prompt,
            "ability": "exact answer",
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, question in enumerate(questions)
    ]
    _write(path, rows)


def _write_sft(path: Path, questions: list[Question]) -> None:
    """The training questions with their answers, for a policy that does not know the form yet."""
    answer = {"upcycle/number": "Answer: {}", "upcycle/exact": "{}"}
    _write(
        path,
        [
            {"messages": [*q.prompt, {"role": "assistant", "content": answer[q.source].format(q.answer)}]}
            for q in questions
        ],
    )


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), path, compression="zstd")
