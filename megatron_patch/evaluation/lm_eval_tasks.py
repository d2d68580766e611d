"""A suite as a directory of lm-eval tasks: `lm_eval --tasks NAME --include_path DIRECTORY` scores what `evaluate` scores.

    NAME.yaml                 the group: every task once, and the held-out text
    NAME_TASK.yaml            exact answers by `loglikelihood`: is every token of the answer, EOS included, the arg-max?
    NAME_TASK_generate.yaml   the same rows by `generate_until`, for servers that give text only
    NAME_generate.yaml        the group of these
    NAME_heldout.yaml         perplexity per token of the documents
    NAME_*.jsonl              their rows, prompts already written by the chat template
    suite_functions.py        what the task files name

Both forms of a task ask what greedy decoding gives. The first needs one forward pass a row instead of one a token.
Documents are `loglikelihood` with BOS as context, not `loglikelihood_rolling`: the latter adds BOS to what a tokenizer
with `add_bos_token` already begins with BOS, and would take what `max_length` cuts off for a further window.
"""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.evaluation.encode import Example
from megatron_patch.evaluation.suite import Suite

FUNCTIONS = Path(__file__).with_name("lm_eval_functions.py")
MODULE = "suite_functions"
MARGIN = 8  # tokens generated beyond the longest answer, so that one that runs on differs from one that stops
EXACT_MATCH, PERPLEXITY = "exact_match", "token_perplexity"  # metrics, by the names that lm-eval reports


@dataclass(frozen=True)
class LmEvalTasks:
    """A directory of tasks, and lm-eval's names for the suite's: `exact` and `generated` in the suite's order."""

    directory: Path
    group: str
    exact: list[str]
    generated: list[str]
    documents: str


def write_lm_eval_tasks(
    directory: Path, suite: Suite, tasks: Sequence[Sequence[Example]], documents: Sequence[Example], eos_token: str
) -> LmEvalTasks:
    """Write the suite into an existing, empty directory; it holds no path, so it may be moved.

    Args:
        directory: where the files go.
        suite: names and descriptions.
        tasks: the encoded rows of each task, in the suite's order.
        documents: the encoded held-out documents.
        eos_token: the tokenizer's; where generation stops.

    Raises:
        UserError: two tasks whose names lm-eval could not tell apart.
    """
    group = _name(suite.name)
    exact = [f"{group}_{_name(task.name)}" for task in suite.tasks]
    names = LmEvalTasks(directory, group, exact, [f"{name}_generate" for name in exact], f"{group}_heldout")
    _check_names(suite, [names.group, f"{group}_generate", *names.exact, *names.generated, names.documents])
    shutil.copyfile(FUNCTIONS, directory / f"{MODULE}.py")
    for task, examples, name, generated in zip(suite.tasks, tasks, names.exact, names.generated, strict=True):
        _write_rows(directory / f"{name}.jsonl", [_row(example, eos_token) for example in examples])
        longest = max(len(example.ids) - example.start for example in examples)
        until = json.dumps([eos_token])
        _write_task(directory, name, f"{name}.jsonl", task.description, "greedy", "loglikelihood")
        limits = f"{{until: {until}, max_gen_toks: {longest + MARGIN}, do_sample: false, temperature: 0.0}}"
        _write_task(
            directory, generated, f"{name}.jsonl", task.description, "written", "generate_until",
            f"generation_kwargs: {limits}\n",
        )  # fmt: skip
    _write_rows(
        directory / f"{names.documents}.jsonl",
        [{**_row(example, eos_token), "tokens": len(example.ids) - example.start} for example in documents],
    )
    _write_task(directory, names.documents, f"{names.documents}.jsonl", "held-out text", "loss", "loglikelihood")
    for name, members in ((group, [*exact, names.documents]), (f"{group}_generate", names.generated)):
        (directory / f"{name}.yaml").write_text(f"group: {json.dumps(name)}\ntask: {json.dumps(members)}\n", "utf-8")
    return names


def _name(name: str) -> str:
    """A name that lm-eval's command line and file names can carry: commas, blanks and patterns would be read otherwise."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


def _check_names(suite: Suite, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(
            f"lm-eval's names of a suite's tasks must differ: {', '.join(twice)} of suite {suite.name!r} stands twice "
            "(signs other than letters, digits, '_', '.', '-' become '_'; 'heldout' and '..._generate' are taken); "
            "rename the task"
        )


def _row(example: Example, eos_token: str) -> dict[str, Any]:
    answer = example.continuation.removesuffix(eos_token)
    return {"context": example.context, "continuation": example.continuation, "answer": answer}


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_task(
    directory: Path, name: str, rows: str, description: str, scorer: str, output_type: str, more: str = ""
) -> None:
    """One task file. A JSON string is a YAML string."""
    metric, aggregation, up = (PERPLEXITY, "weighted_perplexity", "false")
    if scorer != "loss":
        metric, aggregation, up = (EXACT_MATCH, "mean", "true")
    comment = "".join(f"# {line}\n" for line in description.splitlines())
    text = f"""{comment}task: {json.dumps(name)}
custom_dataset: !function {MODULE}.rows
dataset_kwargs: {{file: {json.dumps(rows)}}}
test_split: test
output_type: {output_type}
doc_to_text: context
doc_to_target: continuation
target_delimiter: ""
num_fewshot: 0
process_results: !function {MODULE}.{scorer}
metric_list: [{{metric: {metric}, aggregation: {aggregation}, higher_is_better: {up}}}]
{more}metadata: {{version: 1.0}}
"""
    (directory / f"{name}.yaml").write_text(text, encoding="utf-8")
