"""Which samples make which micro-batch: a function of the seed and of how many samples were consumed, nothing "
"else."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megatron_patch.data.batch import PackedBatch, Row, collate
from megatron_patch.errors import UserError

FILLER = -1  # in place of a sample number: past the end of the evaluation data


def micro_batches_per_step(micro_batch_size: int, global_batch_size: int, dp_size: int) -> int:
    """How many micro-batches each data-parallel rank computes per step.

    Raises:
        UserError: the global batch is not a multiple of micro-batch size x data-parallel size.
    """
    together = micro_batch_size * dp_size
    if micro_batch_size < 1 or global_batch_size < 1 or global_batch_size % together:
        nearest = max(together, global_batch_size // max(together, 1) * together)
        raise UserError(
            f"--global-batch-size must be a multiple of --micro-batch-size x data-parallel size: {global_batch_size} "
            f"is not a multiple of {micro_batch_size} x {dp_size}; use e.g. {nearest}"
        )
    return global_batch_size // together


class MicroBatches:
    """Endless iterator over lists of sample numbers, one list per micro-batch of this data-parallel rank.

    The samples form one endless sequence: each epoch in an order of its own (seed + epoch), epochs without a gap, so
    the last, partial global batch of an epoch runs on into the next and no sample is left out. A global batch is the
    next `global_batch_size` of them, whatever the ranks and the micro-batch size; to resume is to start later.

    Args:
        num_samples: size of the dataset.
        consumed_samples: samples that earlier steps took, over all ranks.
        shuffle: False keeps the dataset's order in every epoch (megatron-core's GPTDataset is shuffled already).

    Raises:
        UserError: an empty dataset, or sizes that do not divide.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        consumed_samples: int = 0,
        shuffle: bool = True,
    ) -> None:
        if num_samples < 1:
            raise UserError("there are no training samples; check --data-path and --split")
        self.per_step = micro_batches_per_step(micro_batch_size, global_batch_size, dp_size)
        self.num_samples, self.micro_batch_size, self.global_batch_size = (
            num_samples,
            micro_batch_size,
            global_batch_size,
        )
        self.dp_rank, self.dp_size, self.seed, self.shuffle = dp_rank, dp_size, seed, shuffle
        self.consumed_samples = consumed_samples
        self._orders: dict[int, np.ndarray] = {}

    def __iter__(self) -> Iterator[list[int]]:
        position = self.consumed_samples
        while True:
            for places in self.positions(position):
                yield [self.sample(place) for place in places]
            position += self.global_batch_size

    def positions(self, consumed_samples: int) -> list[list[int]]:
        """Where this rank's micro-batches of the step after so many samples stand in the endless sequence."""
        firsts = [(number * self.dp_size + self.dp_rank) * self.micro_batch_size for number in range(self.per_step)]
        return [[consumed_samples + first + i for i in range(self.micro_batch_size)] for first in firsts]

    def upcoming(self, until: int) -> np.ndarray:
        """The sample numbers, ascending, each once, that the run takes before `until` samples are consumed."""
        if math.ceil(self.consumed_samples / self.num_samples) + 1 <= until // self.num_samples:
            return np.arange(self.num_samples)  # a whole epoch is among them
        return np.unique(np.array([self.sample(i) for i in range(self.consumed_samples, until)], dtype=np.int64))

    def sample(self, position: int) -> int:
        """The number in the dataset of a place of the endless sequence."""
        epoch, place = divmod(position, self.num_samples)
        if not self.shuffle:
            return place
        if epoch not in self._orders:
            if len(self._orders) > 1:  # a micro-batch touches two epochs at most, unless the dataset is tiny
                del self._orders[min(self._orders)]
            self._orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        return int(self._orders[epoch][place])


def evaluation_micro_batches(
    num_samples: int,
    *,
    eval_iters: int,
    micro_batch_size: int,
    global_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
) -> list[list[int]]:
    """This rank's micro-batches for the first `eval_iters` global batches of the validation data, in fixed order.

    No sample comes twice: where the data end before the global batch does, `FILLER` stands in, which has no loss, so
    that all ranks compute equally many micro-batches.

    Raises:
        UserError: no validation samples, or sizes that do not divide.
    """
    if num_samples < 1:
        raise UserError("there are no validation samples; check --valid-data-path and --split, or set --eval-iters 0")
    per_step = micro_batches_per_step(micro_batch_size, global_batch_size, dp_size)
    steps = min(eval_iters, math.ceil(num_samples / global_batch_size))
    batches = []
    for micro_batch in range(steps * per_step):
        start = (micro_batch * dp_size + dp_rank) * micro_batch_size
        numbers = range(start, start + micro_batch_size)
        batches.append([number if number < num_samples else FILLER for number in numbers])
    return batches


class _WithFiller(Dataset):
    def __init__(self, dataset: Sequence[Row]) -> None:
        self.dataset = dataset

    def __getitem__(self, number: int) -> tuple[Row, bool]:
        return self.dataset[0 if number == FILLER else number], number != FILLER


def load_batches(
    dataset: Any, micro_batches: Iterable[list[int]], *, num_workers: int = 0, **collate_settings: Any
) -> Iterator[PackedBatch]:
    """The batches that `micro_batches` names, in order.

    Args:
        dataset: `dataset[i]` is a `Row`.
        num_workers: processes that load ahead; 0 loads in this one. The order is the same.
        collate_settings: `collate`'s keyword arguments.
    """
    together: Callable[[list], PackedBatch] = partial(collate, **collate_settings)
    generator = (
        torch.Generator()
    )  # of its own: a DataLoader draws from the global one, which a resume must find untouched
    loader = DataLoader(
        _WithFiller(dataset),
        batch_sampler=micro_batches,
        num_workers=num_workers,
        collate_fn=together,
        generator=generator,
    )
    return iter(loader)
