"""Scores from one teacher-forced forward pass per batch: exact answers, loss on documents, KL between ablations.

An answer counts when each of its tokens, the end token included, is the arg-max given the right tokens before it: that
is so exactly when greedy decoding writes the answer and stops. Logits are computed at scored positions only, some at a
time: with a vocabulary of 102,400 those of a whole batch would be gigabytes.

Shape letters: B rows of a batch, S tokens, D hidden size, P scored positions of a batch, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_patch.errors import UserError
from megatron_patch.evaluation.ablations import WITH, Ablation, fan_out
from megatron_patch.evaluation.encode import Example

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS_AT_ONCE = 1 << 25  # numbers: 128 MiB in fp32
PAD = 0  # any id: padding stands on the right, where no scored position sees it
Progress = Callable[[int], object]


@dataclass(frozen=True)
class DocumentScores:
    """Per document, fp64 [n] on the CPU, in the order given.

    Attributes:
        nll: `WITH` and each ablation's name -> summed negative log-likelihood of the scored tokens, nats.
        kl: each ablation's name -> summed KL(with || ablation) at the same positions, nats.
        tokens: scored tokens.
    """

    nll: dict[str, Tensor]
    kl: dict[str, Tensor]
    tokens: Tensor


@dataclass(frozen=True)
class _Batch:
    """index: [B] places of the rows among the examples; row, column: [P]; target: [P] ids at (row, column + 1)."""

    index: Tensor
    ids_BS: Tensor
    mask_BS: Tensor
    row: Tensor
    column: Tensor
    target: Tensor


@torch.inference_mode()
def exact_matches(
    model: "PreTrainedModel",
    examples: Sequence[Example],
    ablations: Mapping[str, Ablation] | None = None,
    *,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Whether greedy decoding gives each example's tokens from `start` on.

    Args:
        model: in evaluation mode.
        examples: prompt and answer; the answer ends with the token at which decoding stops.
        ablations: under which to score as well; see `fan_out`.
        batch_size: rows per forward pass.
        progress: called with the number of tokens done after each batch.

    Returns:
        `WITH` and each ablation's name -> fp64 [n] of 0 and 1, in the order of `examples`.

    Raises:
        UserError: a logit is not finite.
    """
    ablations = ablations or {}
    correct = {name: torch.zeros(len(examples), dtype=torch.float64) for name in (WITH, *ablations)}
    for batch in _batches(examples, batch_size, model.device):
        wrong = {name: torch.zeros(len(batch.index), dtype=torch.int64, device=model.device) for name in correct}
        hidden = fan_out(model, batch.ids_BS, batch.mask_BS, ablations)
        for part, logits in _logits(model, hidden, batch):
            for name, logits_PV in logits.items():
                best, choice = logits_PV.max(-1)
                _require_finite(best, name)
                wrong[name].index_add_(0, batch.row[part], (choice != batch.target[part]).long())
        for name, count in wrong.items():
            correct[name][batch.index] = (count == 0).double().cpu()
        if progress is not None:
            progress(int(batch.mask_BS.sum()))
    return correct


@torch.inference_mode()
def document_scores(
    model: "PreTrainedModel",
    examples: Sequence[Example],
    ablations: Mapping[str, Ablation] | None = None,
    *,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> DocumentScores:
    """Negative log-likelihood of documents, and what each ablation changes in the predicted distributions.

    Arguments and errors as in `exact_matches`.
    """
    ablations = ablations or {}
    nll = {name: torch.zeros(len(examples), dtype=torch.float64) for name in (WITH, *ablations)}
    kl = {name: torch.zeros(len(examples), dtype=torch.float64) for name in ablations}
    for batch in _batches(examples, batch_size, model.device):
        document = batch.index[batch.row.cpu()]  # [P] the example each position belongs to
        hidden = fan_out(model, batch.ids_BS, batch.mask_BS, ablations)
        for part, logits in _logits(model, hidden, batch):
            log_p = {name: logits_PV.log_softmax(-1) for name, logits_PV in logits.items()}
            p_PV = log_p[WITH].exp()
            for name, log_p_PV in log_p.items():
                loss = -log_p_PV.gather(-1, batch.target[part, None]).squeeze(-1)
                _require_finite(loss, name)
                nll[name].index_add_(0, document[part], loss.double().cpu())
                if name in kl:
                    divergence = (p_PV * (log_p[WITH] - log_p_PV)).sum(-1, dtype=torch.float64)
                    kl[name].index_add_(0, document[part], divergence.cpu())
        if progress is not None:
            progress(int(batch.mask_BS.sum()))
    tokens = torch.tensor([len(example.ids) - example.start for example in examples], dtype=torch.float64)
    return DocumentScores(nll, kl, tokens)


def _batches(examples: Sequence[Example], batch_size: int, device: torch.device) -> Iterator[_Batch]:
    """Batches of similar length, the longest first: little padding, and a lack of memory shows at once."""
    order = sorted(range(len(examples)), key=lambda i: -len(examples[i].ids))
    for begin in range(0, len(order), batch_size):
        index = order[begin : begin + batch_size]
        rows = [examples[i] for i in index]
        longest = len(rows[0].ids)
        ids = torch.tensor([[*row.ids, *[PAD] * (longest - len(row.ids))] for row in rows], device=device)
        mask = torch.tensor([[1] * len(row.ids) + [0] * (longest - len(row.ids)) for row in rows], device=device)
        places = [(b, s) for b, row in enumerate(rows) for s in range(row.start - 1, len(row.ids) - 1)]
        row, column = torch.tensor(places, device=device).unbind(1)
        yield _Batch(torch.tensor(index), ids, mask, row, column, ids[row, column + 1])


def _logits(
    model: "PreTrainedModel", hidden: Mapping[str, Tensor], batch: _Batch
) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Logits at the scored positions, fp32, in parts that fit: (which of the P positions, name -> [part, V])."""
    head = model.get_output_embeddings()
    size = max(1, LOGITS_AT_ONCE // (head.weight.shape[0] * len(hidden)))
    for begin in range(0, len(batch.row), size):
        part = slice(begin, begin + size)
        yield part, {name: head(h[batch.row[part], batch.column[part]]).float() for name, h in hidden.items()}


def _require_finite(values: Tensor, name: str) -> None:
    if not bool(values.isfinite().all()):
        scored = "the model" if name == WITH else f"the model ({name})"
        raise UserError(
            f"logits must be finite: {scored} gives {int((~values.isfinite()).sum())} values that are not; its weights "
            "hold NaN or too large values, check it with `dsa-upcycle check`, or give --dtype float32"
        )
