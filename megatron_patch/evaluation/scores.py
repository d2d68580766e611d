"""lm-eval in this process: a loaded model, or a served one, on the tasks that `lm_eval_tasks.py` wrote.

An answer counts when each of its tokens, the end token included, is the arg-max given the right tokens before it: that
is so exactly when greedy decoding writes the answer and stops.

lm-eval is imported when it is first used: with its own requirements that takes seconds.
"""

import importlib.metadata
import importlib.util
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_patch.errors import UserError
from megatron_patch.evaluation.lm_eval_tasks import EXACT_MATCH, PERPLEXITY, LmEvalTasks

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FILTER = "none"  # lm-eval's name for "as the model gave it"
SOFTMAX_DTYPE = "float32"  # whatever the weights are: in bf16 a document's loss would lose its third digit


@dataclass(frozen=True)
class HarnessScores:
    """What lm-eval found; rows in the suite's order.

    Attributes:
        tasks: fp64 [rows] of 0 and 1 of each task.
        log_likelihood: fp64 [documents], nats; None where documents were not scored.
        perplexity: lm-eval's own figure per token over the documents.
    """

    tasks: list[Tensor]
    log_likelihood: Tensor | None
    perplexity: float | None


def require_lm_eval() -> str:
    """lm-eval's version.

    Raises:
        UserError: it, or what its `hf` and `local-completions` need beside it, is not installed.
    """
    for name in ("lm_eval", "accelerate", "tenacity", "aiohttp", "requests"):
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"evaluate scores through lm-eval: {name} is not installed; pip install lm_eval accelerate tenacity aiohttp "
                "requests, in the versions of requirements/cpu.txt"
            )
    return importlib.metadata.version("lm_eval")


def wrap_model(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", batch_size: int) -> "LM":
    """lm-eval's `hf` around a model in memory, so that hooks and ablations on it stay."""
    from lm_eval.models.huggingface import HFLM

    with quiet():  # it warns of every argument that a loaded model makes needless
        return HFLM(model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype=SOFTMAX_DTYPE)


def score_exact(lm: "LM", tasks: LmEvalTasks, label: str) -> HarnessScores:
    """The group `tasks.group`: exact answers and documents, by log-likelihoods.

    Args:
        lm: what `wrap_model` gave.
        tasks: their directory.
        label: stands before the progress bar.

    Raises:
        UserError: a log-likelihood is not finite, or memory ran out.
    """
    with _progress(lm, label):
        found = _evaluate(lm, tasks, tasks.group)
    values = {name: _log_likelihoods(found, name) for name in (*tasks.exact, tasks.documents)}
    broken = sum(int((~each.isfinite()).sum()) for each in values.values())
    if broken:  # arg-max over NaN would score as a wrong answer, in silence
        raise UserError(
            f"logits must be finite: {label} gives {broken} of {sum(map(len, values.values()))} log-likelihoods that are "
            "not; its weights hold NaN or too large values, check it with `dsa-upcycle check`, or give --dtype float32"
        )
    return HarnessScores(_matches(found, tasks.exact), values[tasks.documents], _perplexity(found, tasks))


def score_task(lm: "LM", tasks: LmEvalTasks, name: str) -> Tensor:
    """One task of `tasks.exact` alone: fp64 [rows] of 0 and 1."""
    return _matches(_evaluate(lm, tasks, name), [name])[0]


def score_generated(lm: "LM", tasks: LmEvalTasks) -> HarnessScores:
    """The group of `generate_until` tasks: exact answers as text; no documents."""
    return HarnessScores(_matches(_evaluate(lm, tasks, f"{tasks.group}_generate"), tasks.generated), None, None)


def score_documents(lm: "LM", tasks: LmEvalTasks) -> HarnessScores:
    """The documents alone."""
    found = _evaluate(lm, tasks, tasks.documents)
    return HarnessScores([], _log_likelihoods(found, tasks.documents), _perplexity(found, tasks))


def _evaluate(lm: "LM", tasks: LmEvalTasks, name: str) -> dict[str, Any]:
    """What the command line does with `--tasks NAME --include_path DIRECTORY`, less its own standard errors."""
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    with quiet():
        manager = TaskManager(include_path=str(tasks.directory), include_defaults=False)
        try:
            return evaluate(lm, manager.load([name]), bootstrap_iters=0, log_samples=True)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"logits of a whole batch must fit in memory, rows x tokens x vocabulary in fp32: {error}; give a "
                "smaller --batch-size"
            ) from None


def _samples(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return sorted(found["samples"][name], key=lambda row: row["doc_id"])


def _matches(found: dict[str, Any], names: Sequence[str]) -> list[Tensor]:
    return [torch.tensor([row[EXACT_MATCH] for row in _samples(found, name)]).double() for name in names]


def _log_likelihoods(found: dict[str, Any], name: str) -> Tensor:
    return torch.tensor([row["filtered_resps"][0][0] for row in _samples(found, name)]).double()


def _perplexity(found: dict[str, Any], tasks: LmEvalTasks) -> float:
    return float(found["results"][tasks.documents][f"{PERPLEXITY},{FILTER}"])


@contextmanager
def _progress(lm: "LM", label: str) -> Iterator[None]:
    """One bar over the positions that the model computes, in place of lm-eval's bars for each step of each task."""
    with tqdm(unit="tok", unit_scale=True, desc=f"score {label}", file=sys.stderr) as bar:

        def count(_module: Any, _inputs: Any, output: Any) -> None:
            bar.update(output.logits[..., 0].numel())

        hook = lm.model.register_forward_hook(count)
        try:
            yield
        finally:
            hook.remove()


@contextmanager
def quiet() -> Iterator[None]:
    """lm-eval logs, and draws on stderr, what its command line's users want to see; here its warnings would alarm."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
