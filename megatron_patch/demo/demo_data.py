"""What the quickstart trains on and is scored by: files under `demo_data/` of a base made by `dsa-upcycle demo-base`."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

from megatron_patch.demo.corpus import Corpus
from megatron_patch.demo.tasks import TASKS, continuation, conversation, suite_row

SUITE_ROWS = 200  # per task: a standard error of at most 3.6 points
HELD_OUT_TOKENS = 256
PROSE_SHARE = 0.08  # of the conversations: without them fine-tuning costs the model its prose


def write_demo_data(
    directory: Path, corpus: Corpus, *, conversations: int, rows: int = SUITE_ROWS, seed: int = 1234
) -> None:
    """Write `pretrain.jsonl`, `sft.jsonl` and `suite/` into an existing directory.

    Args:
        conversations: number of fine-tuning conversations: `PROSE_SHARE` of them continue a passage, the others are dealt
            out by the tasks' `sft_weight`.
        rows: scored rows per task.
    """
    rng = random.Random(seed)
    write_jsonl(directory / "pretrain.jsonl", ({"text": text} for text in [*corpus.added, *corpus.base]))
    passages = [*corpus.base, *corpus.added]
    weights = [task.sft_weight for task in TASKS]

    def chat() -> list:
        if rng.random() < PROSE_SHARE:
            return continuation(rng, passages)
        return conversation(rng.choices(TASKS, weights)[0], rng, passages)

    write_jsonl(directory / "sft.jsonl", ({"messages": chat()} for _ in range(conversations)))
    suite = directory / "suite"
    suite.mkdir()
    for task in TASKS:
        write_jsonl(suite / f"{task.name}.jsonl", (suite_row(task, rng, corpus.held_out) for _ in range(rows)))
    write_jsonl(suite / "heldout.jsonl", ({"text": text} for text in corpus.held_out))
    description = {
        "schema": 1,
        "name": "demo",
        "tasks": [
            {
                "name": task.name,
                "file": f"{task.name}.jsonl",
                "metric": "exact_match",
                "chance": task.chance,
                "taught_to_base": task.taught_to_base,
                "description": task.description,
            }
            for task in TASKS
        ],
        "perplexity": {"file": "heldout.jsonl", "text_key": "text", "max_length": HELD_OUT_TOKENS},
    }
    (suite / "suite.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """One JSON object a line, UTF-8."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
