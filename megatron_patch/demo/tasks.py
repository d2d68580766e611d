"""Chat tasks with exact answers. Five are taught to the base; `needle` is left for supervised fine-tuning.

A conversation states its material, then asks many short questions about it: dense supervision from few tokens.
Every instance belongs to the suite or to training by a hash of its content, so the two never share one.
"""

import itertools
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

NAMES = (
    "Ada Bob Cleo Dora Egon Fay Gus Hugo Ivy Jack Kurt Lena Milo Nora Otto Pia Quin Rosa Sven Tess Ugo Vera Walt Xena "
    "Yuri Zoe"
).split()
THINGS = (
    "anvil basket candle drum easel fork globe hammer inkpot jug kettle lamp mirror needle oboe pebble quilt ribbon "
    "saddle teapot umbrella violin whistle xylophone yarn zither"
).split()
WHOLE_PIECES = (
    "\n",
    "\n\n",
    "User:",
    "Assistant:",
    *"0123456789",
    *("▁" + word for word in ["Ready", *NAMES, *THINGS]),
)
PAIRS = 16  # in a list of pairs
LISTED = 24  # words in a plain list
COPIED = 12
PASSAGE_WORDS = 26  # with the instruction, more than 32 words stand between the last pair and the first question
CONTINUED_WORDS = 45
SUITE_SHARE = 5  # one instance in five is kept for the suite

Message = dict[str, str]
Turn = tuple[str, str]  # question, answer


@dataclass(frozen=True)
class Task:
    """One kind of conversation.

    Attributes:
        opening: builds (first user message, turns) from a random generator, a passage of text and a size in (0, 1].
        chance: score of a blind guess.
        recall: the answer stands in the first message, more than 32 tokens before every question.
    """

    name: str
    opening: Callable[[random.Random, str, float], tuple[str, list[Turn]]]
    chance: float
    taught_to_base: bool
    recall: bool
    base_weight: float  # shares of the conversations that the base and fine-tuning see
    sft_weight: float
    description: str


def for_suite(content: str) -> bool:
    """Whether an instance with this content is kept for scoring (and so never trained on)."""
    return zlib.crc32(content.encode()) % SUITE_SHARE == 0


def _pairs(rng: random.Random, count: int) -> list[tuple[str, str]]:
    return list(zip(rng.sample(NAMES, count), rng.sample(THINGS, count)))


def _scaled(most: int, size: float) -> int:
    """`size` of the full amount, but at least 4."""
    return max(4, round(most * size))


def _table(pairs: list[tuple[str, str]], passage: str, instruction: str) -> str:
    return f"{' '.join(name + ' ' + thing for name, thing in pairs)}\n{passage}\n{instruction}"


def _lookup(rng: random.Random, passage: str, size: float) -> tuple[str, list[Turn]]:
    pairs = _pairs(rng, _scaled(PAIRS, size))
    first = _table(pairs, passage, "I give a name. You say it and its thing.")
    return first, [(name, f"{name} {thing}") for name, thing in rng.sample(pairs, len(pairs))]


def _needle(rng: random.Random, passage: str, size: float) -> tuple[str, list[Turn]]:
    del size
    thing = rng.choice(THINGS)
    words = [word for word in passage.split() if not any(other in word.lower() for other in THINGS)]
    words.insert(rng.randint(1, 4), thing)
    return " ".join(words), [("Say the thing.", thing)]


def _following(rng: random.Random, passage: str, size: float) -> tuple[str, list[Turn]]:
    words = rng.sample(THINGS, _scaled(LISTED, size))
    turns = [(word, f"{word} {after}") for word, after in itertools.pairwise(words)]
    first = f"{' '.join(words)}\n{passage}\nI give a word. You say it and the word after it."
    return first, rng.sample(turns, min(len(turns), PAIRS))


def _copy(rng: random.Random, passage: str, size: float) -> tuple[str, list[Turn]]:
    del passage
    words = [" ".join(rng.sample(NAMES + THINGS, rng.randint(3, _scaled(COPIED, size)))) for _ in range(8)]
    return "Repeat the words.", [(turn, turn) for turn in words]


def _successor(rng: random.Random, passage: str, size: float) -> tuple[str, list[Turn]]:
    del passage, size
    return "Count on by one.", [(str(n), str(n + 1)) for n in rng.sample(range(100, 999), 14)]


def _larger(rng: random.Random, passage: str, size: float) -> tuple[str, list[Turn]]:
    del passage, size
    turns = [rng.sample(range(10, 100), 2) for _ in range(12)]
    return "Say the larger number.", [(f"{a} {b}", str(max(a, b))) for a, b in turns]


TASKS = (
    Task(
        "lookup",
        _lookup,
        1 / PAIRS,
        True,
        True,
        2.0,
        1.0,
        "the thing that stands after a given name in a list of pairs",
    ),
    Task("following", _following, 1 / 24, True, True, 1.5, 0.8, "the word after a given word in a list"),
    Task("copy", _copy, 0.0, True, False, 1.5, 0.8, "repeat a few words"),
    Task("successor", _successor, 0.0, True, False, 0.7, 0.7, "the number after a given one"),
    Task("larger", _larger, 0.5, True, False, 1.0, 0.7, "the larger of two numbers"),
    Task(
        "needle",
        _needle,
        1 / len(THINGS),
        False,
        True,
        0.0,
        15.0,
        "the one thing among the first words of a passage",
    ),
)


def instance(
    task: Task, rng: random.Random, passages: list[str], suite: bool, size: float = 1.0
) -> tuple[str, list[Turn]]:
    """Draw a passage, a first message and its turns until they belong to the suite (`suite`) or to training.

    A recall task is told apart by its material, which no other conversation may share; for the others each turn counts.
    """
    while True:
        first, turns = task.opening(rng, _passage(rng, passages), size)
        if task.recall:
            if for_suite(first.split("\n", 1)[0]) == suite:
                return first, turns
        elif suite:  # the last turn is the one that is scored
            scored = [turn for turn in turns if for_suite(task.name + turn[0])]
            if scored:
                rest = [turn for turn in turns if turn not in scored]
                return first, [*rest, scored[0]]
        else:
            turns = [turn for turn in turns if not for_suite(task.name + turn[0])]
            if turns:
                return first, turns


def conversation(task: Task, rng: random.Random, passages: list[str], size: float = 1.0) -> list[Message]:
    """A training conversation: the material, the assistant's "ready", then every turn. `size` 1 is as in the suite."""
    first, turns = instance(task, rng, passages, False, size)
    return _messages(first, turns)


def continuation(rng: random.Random, passages: list[str]) -> list[Message]:
    """A chat about prose: the user begins a passage, the assistant goes on. Never scored; it keeps the prose alive."""
    words = _passage(rng, passages, CONTINUED_WORDS).split()
    begun = CONTINUED_WORDS // 3
    return [
        {"role": "user", "content": f"Go on: {' '.join(words[:begun])}"},
        {"role": "assistant", "content": " ".join(words[begun:])},
    ]


def suite_row(task: Task, rng: random.Random, passages: list[str], earlier: int = 3) -> dict:
    """A scored row: the material, up to `earlier` answered turns, one open question and its answer."""
    first, turns = instance(task, rng, passages, suite=True)
    before = turns[: min(rng.randint(0, earlier), len(turns) - 1)]
    question, answer = turns[-1]
    return {"messages": [*_messages(first, before), {"role": "user", "content": question}], "answer": answer}


def _messages(first: str, turns: list[Turn]) -> list[Message]:
    messages = [{"role": "user", "content": first}, {"role": "assistant", "content": "Ready"}]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def _passage(rng: random.Random, passages: list[str], count: int = PASSAGE_WORDS) -> str:
    """`count` words in a row, from one of the passages that have so many."""
    words: list[str] = []
    while len(words) < count:
        words = rng.choice(passages).split()
    start = rng.randint(0, len(words) - count)
    return " ".join(words[start : start + count])
