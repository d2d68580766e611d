"""A micro-batch: documents laid end to end without padding, delimited by `cu_seqlens`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor

UNNUMBERED = -1


class Row(NamedTuple):
    """One sample, S tokens; `labels[t]` is the token that follows `tokens[t]`.

    `number` is the row's own in its data set, the same in every epoch, or `UNNUMBERED` where no row comes twice.
    """

    tokens: Tensor  # int64 [S]
    labels: Tensor  # int64 [S]
    loss_mask: Tensor  # float32 [S], 1 where the label counts
    number: int = UNNUMBERED


@dataclass
class PackedBatch:
    """T tokens of a micro-batch. Attention and DSA indices stay inside [cu_seqlens[i], cu_seqlens[i + 1])."""

    tokens: Tensor  # int64 [T]
    labels: Tensor  # int64 [T]
    loss_mask: Tensor  # float32 [T], 1 where the label counts in the loss
    valid: Tensor  # bool [T], False for padding and for fillers of an evaluation's last batch
    cu_seqlens: Tensor  # int32 [documents + 1], first 0, last T
    rows: Tensor = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.int64))  # int64 [rows, 2]: number, tokens

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same batch on `device`."""
        return PackedBatch(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})


def collate(
    rows: Sequence[tuple[Row, bool]], *, cut_after: int | None = None, pad_id: int = 0, multiple_of: int = 1
) -> PackedBatch:
    """Lay rows end to end.

    Args:
        rows: each with whether it counts; one that does not (a filler) has neither loss nor valid tokens.
        cut_after: a document also ends after each such token (EOS), and the label there, the first token of another
            document, does not count. None: only rows are documents (chats hold EOS after every assistant turn).
        pad_id: token for padding.
        multiple_of: pad T up to a multiple (tensor and context parallelism divide T); the padding is one more document.
    """
    tokens = torch.cat([row.tokens for row, _ in rows])
    labels = torch.cat([row.labels for row, _ in rows])
    loss_mask = torch.cat([row.loss_mask * counts for row, counts in rows]).float()
    valid = torch.cat([torch.full_like(row.tokens, counts, dtype=torch.bool) for row, counts in rows])
    is_end = torch.zeros_like(valid)
    is_end[torch.tensor([len(row.tokens) for row, _ in rows]).cumsum(0) - 1] = True
    if cut_after is not None:
        is_eos = tokens == cut_after
        loss_mask = loss_mask.masked_fill(is_eos, 0.0)
        is_end |= is_eos
    ends = [torch.zeros(1, dtype=torch.int32), is_end.nonzero().flatten().int() + 1]
    if padding := -len(tokens) % multiple_of:
        tokens = torch.nn.functional.pad(tokens, (0, padding), value=pad_id)
        labels = torch.nn.functional.pad(labels, (0, padding), value=pad_id)
        loss_mask = torch.nn.functional.pad(loss_mask, (0, padding))
        valid = torch.nn.functional.pad(valid, (0, padding))
        ends.append(torch.tensor([len(tokens)], dtype=torch.int32))
    numbers = torch.tensor([[row.number, len(row.tokens)] for row, _ in rows])
    return PackedBatch(tokens, labels, loss_mask, valid, torch.cat(ends), numbers)
