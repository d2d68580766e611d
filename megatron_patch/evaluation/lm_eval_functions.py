"""Functions that the task files beside this one name. lm-eval loads them; they need nothing but lm-eval's own packages.

`dsa-upcycle evaluate` wrote this directory. The tasks' rows stand in the .jsonl files: `context` is the prompt as the
model's chat template writes it, BOS included, `continuation` what is scored.
"""

import json
from pathlib import Path
from typing import Any


def rows(file: str, **_: Any) -> dict[str, Any]:
    """The data set of a task: `file` beside this module, wherever the directory stands. The rest is lm-eval's metadata."""
    from datasets import Dataset

    lines = Path(__file__).with_name(file).read_text(encoding="utf-8").split("\n")
    return {"test": Dataset.from_list([json.loads(line) for line in lines if line])}


def greedy(doc: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, int]:
    """1 where each token of the continuation, the end token included, is the most probable one."""
    del doc
    ((_, is_greedy),) = results
    return {"exact_match": int(is_greedy)}


def written(doc: dict[str, Any], results: list[str]) -> dict[str, int]:
    """1 where the text generated up to the end token is the answer. Servers differ in whether they keep a space in front."""
    (text,) = results
    return {"exact_match": int(text.lstrip() == doc["answer"].lstrip())}


def loss(doc: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, tuple[float, int]]:
    """Log-likelihood and number of tokens, from which `weighted_perplexity` makes the perplexity per token."""
    ((log_likelihood, _),) = results
    return {"token_perplexity": (log_likelihood, doc["tokens"])}
