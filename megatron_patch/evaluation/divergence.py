"""What each ablation changes in the predicted distributions: KL over the held-out documents.

lm-eval gives a log-likelihood per document; a KL needs whole distributions, so it is computed here. Logits are computed
some positions at a time: with a vocabulary of 102,400 those of a whole batch would be gigabytes.

Shape letters: B rows of a batch, S tokens, D hidden size, P scored positions of a batch, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_patch.evaluation.ablations import WITH, Ablation, fan_out
from megatron_patch.evaluation.encode import Example

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS_AT_ONCE = 1 << 25  # numbers: 128 MiB in fp32
PAD = 0  # any id: padding stands on the right, where no scored position sees it
Progress = Callable[[int], object]


@dataclass(frozen=True)
class _Batch:
    """index: [B] places of the rows among the examples; row, column: [P] scored positions."""

    index: Tensor
    ids_BS: Tensor
    mask_BS: Tensor
    row: Tensor
    column: Tensor


@torch.inference_mode()
def divergences(
    model: "PreTrainedModel",
    examples: Sequence[Example],
    ablations: Mapping[str, Ablation],
    *,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Summed KL(with || ablation) of each example, over the positions that predict its tokens from `start` on.

    Args:
        model: in evaluation mode.
        examples: documents.
        ablations: each may change DSA layers only; see `fan_out`.
        batch_size: documents per forward pass.
        progress: called with the number of tokens done after each batch.

    Returns:
        Each ablation's name -> fp64 [n], nats, in the order of `examples`.
    """
    kl = {name: torch.zeros(len(examples), dtype=torch.float64) for name in ablations}
    for batch in _batches(examples, batch_size, model.device):
        document = batch.index[batch.row.cpu()]  # [P] the example each position belongs to
        hidden = fan_out(model, batch.ids_BS, batch.mask_BS, ablations)
        for part, logits in _logits(model, hidden, batch):
            log_p = {name: logits_PV.log_softmax(-1) for name, logits_PV in logits.items()}
            p_PV = log_p[WITH].exp()
            for name, total in kl.items():
                divergence = (p_PV * (log_p[WITH] - log_p[name])).sum(-1, dtype=torch.float64)
                total.index_add_(0, document[part], divergence.cpu())
        if progress is not None:
            progress(int(batch.mask_BS.sum()))
    return kl


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
        yield _Batch(torch.tensor(index), ids, mask, row, column)


def _logits(
    model: "PreTrainedModel", hidden: Mapping[str, Tensor], batch: _Batch
) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Logits at the scored positions, fp32, in parts that fit: (which of the P positions, name -> [part, V])."""
    head = model.get_output_embeddings()
    size = max(1, LOGITS_AT_ONCE // (head.weight.shape[0] * len(hidden)))
    for begin in range(0, len(batch.row), size):
        part = slice(begin, begin + size)
        yield part, {name: head(h[batch.row[part], batch.column[part]]).float() for name, h in hidden.items()}
