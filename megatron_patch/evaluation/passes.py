"""What one model is scored in: lm-eval's pass as it is, one under each ablation, and the KL between them."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_patch.evaluation.ablations import (
    BYPASSED,
    SCRAMBLED,
    WITH,
    Ablation,
    bypassed,
    layer_name,
    recorded_trunk,
    replayed_trunk,
    scrambled,
)
from megatron_patch.evaluation.divergence import divergences
from megatron_patch.evaluation.encode import Example
from megatron_patch.evaluation.endpoint import Endpoint, wrap_endpoint
from megatron_patch.evaluation.lm_eval_tasks import LmEvalTasks
from megatron_patch.evaluation.loading import ModelDirectory, load_model
from megatron_patch.evaluation.recovery import DocumentScores
from megatron_patch.evaluation.scores import (
    HarnessScores,
    score_documents,
    score_exact,
    score_generated,
    wrap_model,
)
from megatron_patch.evaluation.sides import Planned, Side
from megatron_patch.evaluation.suite import Suite

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Work:
    """What both models are scored on, and how. `tasks`, `documents`: as tokens; `files`: the same for lm-eval."""

    suite: Suite
    tasks: list[list[Example]]
    documents: list[Example]
    files: LmEvalTasks
    tokenizer: "PreTrainedTokenizerBase"
    batch_size: int
    seed: int
    dtype: torch.dtype
    device: torch.device

    @property
    def document_tokens(self) -> Tensor:
        """Scored tokens of each document, fp64 [n]."""
        return torch.tensor([len(example.ids) - example.start for example in self.documents], dtype=torch.float64)


@dataclass(frozen=True)
class Scores:
    """Of one model: each task's scores by name of ablation, and the documents'; None where they were not measured."""

    tasks: list[dict[str, Tensor]]
    documents: DocumentScores | None


def score(
    side: Side, work: Work, label: str, ablated: tuple[int, ...] = (), *, trust_remote_code: bool = False
) -> Scores:
    """Score a side of the comparison, whatever it is; `ablated`: DSA layers of a directory."""
    if isinstance(side, Endpoint):
        return score_endpoint(side, work, label, trust_remote_code=trust_remote_code)
    if isinstance(side, Planned):
        return score_directory(side.directory, work, label, mask=side.mask)
    return score_directory(side, work, label, ablated)


def score_directory(
    directory: ModelDirectory,
    work: Work,
    label: str,
    ablated: tuple[int, ...] = (),
    mask: Callable[["PreTrainedModel"], AbstractContextManager] = nullcontext,
) -> Scores:
    """Load, score within the context that `mask` gives, again with each ablation of the DSA layers `ablated`, and forget
    the model.
    """
    model = load_model(directory, dtype=work.dtype, device=work.device)
    with mask(model):
        found, kl = _score_loaded(model, work, label, ablated)
    del model
    gc.collect()
    return assemble(work, found, kl)


def _score_loaded(
    model: "PreTrainedModel", work: Work, label: str, ablated: tuple[int, ...]
) -> tuple[dict[str, HarnessScores], dict[str, Tensor]]:
    lm = wrap_model(model, work.tokenizer, work.batch_size)
    found: dict[str, HarnessScores] = {}
    ablations = _ablations(model, ablated, work.seed)
    with recorded_trunk(model) if ablations else nullcontext([]) as trunk:
        found[WITH] = score_exact(lm, work.files, label)
    for name, ablation in ablations.items():
        with replayed_trunk(model, trunk), ablation():
            found[name] = score_exact(lm, work.files, f"{label}, DSA layers {name}")
    trunk.clear()
    return found, _divergences(model, ablated, work) if ablations else {}


def score_endpoint(server: Endpoint, work: Work, label: str, *, trust_remote_code: bool = False) -> Scores:
    """Ask a served model: the tasks as text, the documents where it gives log-probabilities."""
    prompts = sum(map(len, work.tasks)) + (len(work.documents) if server.gives_logprobs else 0)
    with tqdm(total=prompts, unit="prompt", desc=f"score {label} (served)") as bar:
        lm = wrap_endpoint(server, work.tokenizer, work.batch_size, bar.update, trust_remote_code=trust_remote_code)
        found = score_generated(lm, work.files)
        if server.gives_logprobs:
            documents = score_documents(lm, work.files)
            found = replace(found, log_likelihood=documents.log_likelihood, perplexity=documents.perplexity)
    return assemble(work, {WITH: found}, {})


def assemble(work: Work, found: dict[str, HarnessScores], kl: dict[str, Tensor]) -> Scores:
    """Scores by task of what lm-eval found by ablation."""
    tasks = [{name: scores.tasks[i] for name, scores in found.items()} for i in range(len(work.tasks))]
    documents = None
    if found[WITH].log_likelihood is not None:
        nll = {name: -scores.log_likelihood for name, scores in found.items()}
        perplexity = {name: scores.perplexity for name, scores in found.items()}
        documents = DocumentScores(nll, kl, work.document_tokens, perplexity)
    return Scores(tasks, documents)


def _ablations(model: "PreTrainedModel", ablated: tuple[int, ...], seed: int) -> dict[str, Ablation]:
    """Each with draws of its own, so that no other pass changes what scrambling does."""
    if not ablated:
        return {}
    generator = torch.Generator().manual_seed(seed)
    return {BYPASSED: partial(bypassed, model), SCRAMBLED: partial(scrambled, model, generator)}


def _divergences(model: "PreTrainedModel", ablated: tuple[int, ...], work: Work) -> dict[str, Tensor]:
    alone = {layer_name(i): partial(bypassed, model, [i]) for i in ablated}
    total = sum(len(example.ids) for example in work.documents)
    with tqdm(total=total, unit="tok", unit_scale=True, desc="participation of the DSA layers") as bar:
        ablations = _ablations(model, ablated, work.seed) | alone
        return divergences(model, work.documents, ablations, batch_size=work.batch_size, progress=bar.update)
