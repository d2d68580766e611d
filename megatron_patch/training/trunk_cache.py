"""The frozen trunk's output, kept on disk row by row and taken from there when the row comes again.

A row is computed alone, whatever micro-batch it stands in: attention never leaves a row, so that its values depend on its tokens
only, and not on the order, the seed, the micro-batch size or the number of data-parallel ranks of the run that met it first.
Training takes the kept, rounded values from the first time on: a run on an empty cache and one on a full cache are the same run.
(Where experts are spread over ranks, an expert sees the tokens of several ranks' rows at once, and the last digits of a row's values
can depend on which rows those were.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from megatron_patch.config import PRETRAIN, TrainSettings
from megatron_patch.data.batch import PackedBatch
from megatron_patch.data.row_store import RowStore, create_or_check, remove
from megatron_patch.data.sampler import MicroBatches
from megatron_patch.devices import ranks
from megatron_patch.devices.device import Device
from megatron_patch.model.builder import forward_pack, packed_seq_params
from megatron_patch.model.dsa_state import DsaState
from megatron_patch.model.layer_pattern import DSA
from megatron_patch.model.trunk import trunk_output

REMEDIES = {
    "base_sha256": "use the base that it was made with",
    "dtype": "give its --trunk-cache-dtype",
    "compute": "train in its precision (--bf16 or not)",
    "device": "train on its kind of --device",
    "data_sha256": "give the data that it was made from",
    "tokenizer_sha256": "give the data and base that it was made from",
    "seq_length": "give its --seq-length",
    "isolate_documents": "give its --isolate-documents",
    "split": "give its --split",
}


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a data set that training can meet, each with a number of its own.

    Attributes:
        key: what makes them these rows.
        starts: int64 [rows + 1]: the first token of each where all lie end to end, and the end.
        upcoming: numbers, ascending, of those that this run will take.
    """

    key: dict[str, object]
    starts: np.ndarray
    upcoming: np.ndarray


def training_rows(settings: TrainSettings, kind: str, train: Dataset, order: MicroBatches, tokenizer_sha256: str) -> TrainingRows:
    """The rows of `train`.

    Chats are numbered through their folder, so that neither --split nor --seq-length matters; rows of text through the training
    documents' one epoch.
    """
    data, steps = settings.data, settings.steps
    positions = order.upcoming(steps.train_iters * steps.global_batch_size)
    key: dict[str, object] = {"kind": kind, "tokenizer_sha256": tokenizer_sha256}
    if kind == PRETRAIN:
        key |= {"data_sha256": train.sha256, "seq_length": data.seq_length, "isolate_documents": data.isolate_documents}
        key["split"] = None if data.valid_data_path else data.split
        starts = np.arange(train.dataset.rows + 1, dtype=np.int64) * data.seq_length
        return TrainingRows(key, starts, np.unique(train.numbers[positions]))
    chats = train.dataset if isinstance(train, Subset) else train
    numbers = np.asarray(train.indices)[positions] if isinstance(train, Subset) else positions
    return TrainingRows(key | {"data_sha256": chats.content_sha256()}, chats.row_starts, np.sort(numbers))


class CachedTrunk:
    """Runs micro-batches through the model, its trunk only for rows that were never met.

    Args:
        model: bare.
        state: of its DSA layers.
        store: of this run's rows.
        layers: of the trunk.
        device: activated.
        experts_spread: whether the ranks must run the trunk together.
    """

    def __init__(self, model: GPTModel, state: DsaState, store: RowStore, layers: int, device: Device, experts_spread: bool = False):
        self.model, self.state, self.store, self.layers = model, state, store, layers
        self.device, self.experts_spread = device, experts_spread
        self._computed: list[int] = []
        self._told = False

    def begin_step(self, batches: Sequence[PackedBatch]) -> None:
        """Forget what the last step computed, and let the system read ahead what this one takes."""
        self._computed.clear()
        for batch in batches:
            for number, _ in batch.rows.tolist():
                self.store.expect(number)

    @property
    def computed(self) -> list[int]:
        """Lengths of the documents that went through the trunk since the step began, on this rank."""
        return self._computed

    def forward(self, model: nn.Module, taken: PackedBatch, batch: PackedBatch) -> Tensor:
        """As `forward_pack` with labels.

        Args:
            model: this model's DDP wrapper.
            taken: the micro-batch on the CPU.
            batch: the same on the device.
        """
        below = self.output(taken, batch)
        before, self.state.bypassed = self.state.bypassed, self.state.bypassed | frozenset(range(self.layers))
        try:
            return forward_pack(model, batch.tokens, batch.cu_seqlens, batch.labels, below)
        finally:
            self.state.bypassed = before

    def output(self, taken: PackedBatch, batch: PackedBatch) -> Tensor:
        """What enters the first DSA layer, rounded as it is kept: [T, 1, D] in the model's dtype. Arguments as `forward`'s."""
        numbers, lengths = taken.rows.T.tolist()
        ends = np.cumsum(lengths).tolist()
        spans = [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]
        assert ends[-1] == len(taken.tokens), "padding is no row"
        found = [self.store.read(number, taken.tokens[span]) for number, span in zip(numbers, spans, strict=True)]
        self._tell_damage()
        missing = [place for place, values in enumerate(found) if values is None]
        for turn in range(self._turns(len(missing))):
            place = missing[turn] if turn < len(missing) else 0  # for the other ranks' sake
            documents = _documents(taken.cu_seqlens, spans[place])
            ends_here = documents.to(self.device.torch_device)
            values = trunk_output(self.model, batch.tokens[spans[place]], packed_seq_params(ends_here), self.layers)
            if turn < len(missing):
                found[place] = values.squeeze(1).to(self.store.dtype)
                self.store.write(numbers[place], taken.tokens[spans[place]], found[place])
                self._computed += documents.diff().tolist()
        dtype = self.model.config.params_dtype
        return torch.cat([values[:, None].to(self.device.torch_device, non_blocking=True).to(dtype) for values in found])

    def _turns(self, missing: int) -> int:
        """How often the trunk runs: with spread experts, as often as on the rank that misses most rows."""
        if not self.experts_spread:
            return missing
        most = torch.tensor([missing], device=self.device.sums_device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=parallel_state.get_expert_model_parallel_group())
        return int(most)

    def _tell_damage(self) -> None:
        if self.store.damaged and not self._told:
            self._told = True
            print(
                f"note: row {self.store.damaged[0]} of {self.store.directory} is damaged, as a loss of power leaves it, and is "
                "computed again; others may follow",
                flush=True,
            )


def _documents(cu_seqlens: Tensor, span: slice) -> Tensor:
    """The boundaries inside one row, counted from its begin: int32 [n + 1]."""
    inside = (cu_seqlens >= span.start) & (cu_seqlens <= span.stop)
    return cu_seqlens[inside] - span.start


def open_trunk(
    settings: TrainSettings,
    model: GPTModel,
    state: DsaState,
    rows: TrainingRows | None,
    base_sha256: str,
    pattern: tuple[str, ...],
    device: Device,
) -> CachedTrunk | None:
    """--trunk-cache opened, its space taken and its size said; None without the flag. All ranks call it.

    Raises:
        UserError: the directory is of another base, other data, or none of ours, or the disk cannot hold what the run will keep.
    """
    if rows is None:
        return None
    directory, dtype = settings.output.trunk_cache, settings.output.trunk_cache_dtype
    layers, width = pattern.index(DSA), model.config.hidden_size
    key = {
        "base_sha256": base_sha256,
        "trunk_layers": layers,
        "compute": "bf16" if settings.precision.bf16 else "fp32",
        "dtype": dtype,
        "device": device.torch_device.type,
        **rows.key,
    }
    with ranks.agreement():
        if ranks.is_main():
            made = create_or_check(directory, key, rows.starts, width, REMEDIES)
            try:
                RowStore(directory, rows.starts, width, dtype).reserve(rows.upcoming, partial(print, flush=True))
            except BaseException:
                if made:  # else it would bind the next try, with fewer or shorter rows, to these
                    remove(directory)
                raise
    with ranks.agreement():
        store = RowStore(directory, rows.starts, width, dtype)
    return CachedTrunk(model, state, store, layers, device, settings.parallel.expert_model_parallel_size > 1)
