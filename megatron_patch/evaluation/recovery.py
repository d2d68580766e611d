"""`recovery.json`: what the scores say about a proxy. Arithmetic alone; no model is touched here.

A task counts towards the verdict when the base itself solves it: base > chance + 2 standard errors. A ratio to a base
that guesses would say nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_patch.evaluation.ablations import BYPASSED, SCRAMBLED, WITH, layer_name
from megatron_patch.evaluation.suite import Task
from megatron_patch.statistics import mean, or_none, ratio

SCHEMA = 1
UPCYCLE, PRUNE = "upcycle", "prune"
RATIO_THRESHOLD = 0.8
PARTICIPATION_THRESHOLD = 0.01  # nats per token
# Nats per token: far above rounding in the dtype (routing can flip in bf16), far below any wrong weight or scale.
BASE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class TaskScores:
    """One task's scores by row, fp64 [n] of 0 and 1: the base's, and `WITH` and each ablation's of the model.

    `beyond_topk`: fraction of rows longer than the DSA layers' top-k, where a selection takes place at all.
    """

    task: Task
    base: Tensor
    model: dict[str, Tensor]
    beyond_topk: float | None


@dataclass(frozen=True)
class DocumentScores:
    """Of the held-out documents, fp64 [n] on the CPU, in the order given.

    Attributes:
        nll: `WITH` and each ablation's name -> summed negative log-likelihood of the scored tokens, nats.
        kl: each ablation's name -> summed KL(with || ablation) at the same positions, nats.
        tokens: scored tokens.
        perplexity: as `nll` -> lm-eval's figure per token.
    """

    nll: dict[str, Tensor]
    kl: dict[str, Tensor]
    tokens: Tensor
    perplexity: dict[str, float]


def task_entry(scores: TaskScores) -> dict[str, Any]:
    """One element of `tasks`."""
    task, with_dsa = scores.task, scores.model[WITH]
    base, model, gain = mean(scores.base), mean(with_dsa), mean(with_dsa - scores.base)
    # NaN compares false: with one row there is no error, so nothing counts.
    counted = base.value > task.chance + STANDARD_ERRORS * base.stderr
    relative = ratio(with_dsa, scores.base) if counted else None
    entry: dict[str, Any] = {
        "name": task.name,
        "metric": task.metric,
        "n": len(task.rows),
        "chance": task.chance,
        "base": base.value,
        "model": model.value,
        "stderr": [or_none(base.stderr), or_none(model.stderr)],
        "ratio": relative.value if relative else None,
        "counted": counted,
        "bypassed": None,
        "scrambled_indices": None,
        "ratio_stderr": or_none(relative.stderr) if relative else None,
        "gain_over_base": gain.value,
        "gain_stderr": or_none(gain.stderr),
        "gain_lost_by_scrambling": None,
        "rows_beyond_topk": scores.beyond_topk,
        "taught_to_base": task.taught_to_base,
        "description": task.description,
    }
    if BYPASSED in scores.model:
        entry["bypassed"] = mean(scores.model[BYPASSED]).value
        entry["scrambled_indices"] = mean(scores.model[SCRAMBLED]).value
        if gain.value > STANDARD_ERRORS * gain.stderr:
            entry["gain_lost_by_scrambling"] = (model.value - entry["scrambled_indices"]) / gain.value
    return entry


def perplexity_entry(base: DocumentScores | None, model: DocumentScores | None, tokens: Tensor) -> dict[str, Any]:
    """`perplexity`: exp of the mean loss per token over documents; `loss_difference` is model - base, paired.

    Args:
        base, model: None where they were not measured; their figures are null then.
        tokens: scored tokens of each document, fp64 [n].
    """
    sides = (base, model)
    values = [side and side.perplexity[WITH] for side in sides]
    losses = [side and ratio(side.nll[WITH], tokens) for side in sides]
    difference = None if None in sides else ratio(model.nll[WITH] - base.nll[WITH], tokens)
    perplexity = {} if model is None else model.perplexity
    return {
        "base": values[0],
        "model": values[1],
        # d exp(x) = exp(x) dx
        "stderr": [loss and or_none(value * loss.stderr) for value, loss in zip(values, losses, strict=True)],
        "loss": [loss and loss.value for loss in losses],
        "loss_stderr": [loss and or_none(loss.stderr) for loss in losses],
        "loss_difference": difference and difference.value,
        "loss_difference_stderr": difference and or_none(difference.stderr),
        "bypassed": perplexity.get(BYPASSED),
        "scrambled_indices": perplexity.get(SCRAMBLED),
        "documents": len(tokens),
        "tokens": int(tokens.sum()),
    }


def participation_entry(model: DocumentScores, layers: tuple[int, ...], beyond_topk: float) -> dict[str, Any]:
    """`participation`: mean KL(with || bypassed) per token, of all DSA layers together and of each alone."""
    total = ratio(model.kl[BYPASSED], model.tokens)
    return {
        "kl_nats": total.value,
        "per_layer": [ratio(model.kl[layer_name(layer)], model.tokens).value for layer in layers],
        "tokens": int(model.tokens.sum()),
        "stderr": or_none(total.stderr),
        "layers": list(layers),
        "scrambled_kl_nats": ratio(model.kl[SCRAMBLED], model.tokens).value,
        "documents_beyond_topk": beyond_topk,
    }


def bypassed_is_base(base: DocumentScores, model: DocumentScores) -> float:
    """Largest difference, over documents, between the base's loss per token and that of the model's base part, nats."""
    return float(((model.nll[BYPASSED] - base.nll[WITH]).abs() / base.tokens).max())


def summary_entry(
    tasks: list[dict[str, Any]], participation: dict[str, Any] | None, not_measured: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`summary`: pass needs a counted task, every counted ratio at the threshold or above, and DSA layers that take part.

    An upcycled model whose DSA layers do nothing has its base's scores, and proves nothing.

    Args:
        tasks: `task_entry` of each.
        participation: `participation_entry`; None without DSA layers, or where it is not measured.
        not_measured: what a verdict would need but a served model does not show.
    """
    ratios = {task["name"]: task["ratio"] for task in tasks if task["counted"]}
    reasons = [
        f"{name}: the model has {value:.3f} of the base's score, below {RATIO_THRESHOLD}"
        for name, value in ratios.items()
        if value < RATIO_THRESHOLD
    ]
    if not ratios:
        reasons.append("no task is counted: the base is not above chance on any")
    if participation is not None and participation["kl_nats"] < PARTICIPATION_THRESHOLD:
        reasons.append(
            f"the DSA layers take no part: bypassing them changes predictions by {participation['kl_nats']:.2g} nats per "
            f"token, below {PARTICIPATION_THRESHOLD}"
        )
    return {
        "min_ratio": min(ratios.values(), default=None),
        "mean_ratio": sum(ratios.values()) / len(ratios) if ratios else None,
        "threshold": RATIO_THRESHOLD,
        "verdict": "fail" if reasons else "pass",
        "counted_tasks": len(ratios),
        "participation_threshold": None if participation is None else PARTICIPATION_THRESHOLD,
        "reasons": reasons,
        "not_measured": list(not_measured),
    }


def fraction_longer(lengths: list[int], topk: int) -> float:
    """Fraction of sequences with more tokens than top-k."""
    return float((torch.tensor(lengths) > topk).double().mean())
