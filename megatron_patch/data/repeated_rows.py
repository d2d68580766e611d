"""Pretraining rows that are the same in every epoch, so that what a frozen base makes of them can be kept.

megatron-core's GPTDataset shuffles the documents of all epochs of a run and cuts the whole sequence: a later epoch has other rows,
and so has a run of another length or seed. A hidden state depends on all tokens of its document before it *in its row*, hence
nothing of one row serves another. Here each prefix is cut once, as GPTDataset cuts a first epoch with a fixed seed, whatever the
run's length and seed; an epoch takes all of these rows in an order of its own (seed, epoch).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from megatron_patch.errors import UserError

CUT_SEED = 1234  # the default of --seed: at that seed a run of one epoch has GPTDataset's rows in GPTDataset's order


class RepeatedRows(Dataset):
    """Items of `parts`, epoch after epoch.

    Args:
        parts: one epoch of each prefix.
        names: of the parts, for messages.
        weights: of the parts in a blend; None: there is one part.
        size: rows that the whole run takes.
        seed: of the order.

    Attributes:
        numbers: int64 [size], the row at each position; the parts' rows are counted through.
        rows: how many different ones there are.

    Raises:
        UserError: a part has no row.
    """

    def __init__(self, parts: Sequence[Any], names: Sequence[str], weights: Sequence[float] | None, size: int, seed: int) -> None:
        for part, name in zip(parts, names, strict=True):
            if not len(part):
                raise UserError(
                    f"--epoch-rows same needs a row in each prefix: the training documents of {name} have fewer than "
                    "--seq-length + 1 tokens; lower it, or use --epoch-rows fresh"
                )
        self.parts = parts
        self._first = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        self.rows = int(self._first[-1])
        part_of = _blend(weights, size)
        self.numbers = np.empty(size, dtype=np.int64)
        for number, part in enumerate(parts):
            positions = np.flatnonzero(part_of == number)
            epochs = -(-len(positions) // len(part))
            orders = [_order(len(part), seed, epoch, number) for epoch in range(epochs)]
            self.numbers[positions] = self._first[number] + np.concatenate([*orders, []]).astype(np.int64)[: len(positions)]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, position: int) -> dict[str, Any]:
        number = self.numbers[position]
        part = int(np.searchsorted(self._first, number, side="right")) - 1
        return self.parts[part][int(number - self._first[part])]


def _order(rows: int, seed: int, epoch: int, part: int) -> np.ndarray:
    if (seed, epoch) == (CUT_SEED, 0):
        return np.arange(rows)  # GPTDataset has shuffled them with this seed
    return np.random.default_rng([seed, epoch, part]).permutation(rows)


def _blend(weights: Sequence[float] | None, size: int) -> np.ndarray:
    """The part at each position, int16 [size], as megatron-core's BlendedDataset chooses it."""
    part_of = np.zeros(size, dtype=np.int16)
    if weights is not None:
        from megatron.core.datasets import helpers
        from megatron.core.datasets.utils import normalize

        helpers.build_blending_indices(part_of, np.zeros(size, dtype=np.int64), normalize(list(weights)), len(weights), size, False)
    return part_of
