"""Loss on held-out data, beside the base's on the same tokens."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_patch.data.batch import PackedBatch
from megatron_patch.devices.device import Device
from megatron_patch.model.builder import forward_pack
from megatron_patch.model.dsa_state import DsaState
from megatron_patch.statistics import ratio
from megatron_patch.training.step import sum_over_ranks


@dataclass(frozen=True)
class Heldout:
    """Means in nats per supervised token, standard errors over documents.

    `delta` is model minus base on the same documents (below zero: better than the base); its error is the paired one,
    which is much smaller than the two errors taken apart.
    """

    loss: float
    loss_stderr: float
    base_loss: float
    delta: float
    delta_stderr: float
    indexer_kl: float
    index_recall: float
    documents: int


class HeldoutEvaluation:
    """Evaluates on a fixed list of batches; the base's losses are computed once, by bypassing the DSA layers.

    Args:
        model: from `build_model`, with or without DDP.
        state: its DSA state.
        batches: this rank's held-out batches, the same at every call.
        dsa_layers: global numbers of the DSA layers.
        device: activated.
    """

    def __init__(
        self,
        model: nn.Module,
        state: DsaState,
        batches: Iterable[PackedBatch],
        dsa_layers: frozenset[int],
        device: Device,
    ):
        self.model, self.state, self.device, self.dsa_layers = model, state, device, dsa_layers
        self.batches = list(batches)
        self._base: tuple[Tensor, Tensor] | None = None

    def __call__(self, stage: str) -> Heldout:
        """Evaluate with the DSA layers in `stage`; leaves the model in the mode it was in."""
        training = self.model.training
        self.model.eval()
        try:
            if self._base is None:
                self.state.bypassed = self.dsa_layers
                try:
                    self._base = self._documents()
                finally:
                    self.state.bypassed = frozenset()
            self.state.stage, self.state.recall = stage, True
            self.state.reset()
            sums, counts = self._documents()
            add_up = partial(sum_over_ranks, device=self.device)
            kl, recall = self.state.means(add_up) or (math.nan, math.nan)
        finally:
            self.model.train(training)
        base_sums, _ = self._base
        loss, delta = ratio(sums, counts), ratio(sums - base_sums, counts)
        return Heldout(
            loss=loss.value,
            loss_stderr=loss.stderr,
            base_loss=ratio(base_sums, counts).value,
            delta=delta.value,
            delta_stderr=delta.stderr,
            indexer_kl=kl,
            index_recall=recall,
            documents=counts.numel(),
        )

    @torch.no_grad()
    def _documents(self) -> tuple[Tensor, Tensor]:
        """Summed loss and number of supervised tokens of each document of all ranks, fp64 [n] on the CPU."""
        sums, counts = [], []
        for cpu_batch in self.batches:
            batch = cpu_batch.to(self.device.torch_device)
            self.state.counted = batch.valid
            losses = forward_pack(self.model, batch.tokens, batch.cu_seqlens, batch.labels)
            document = torch.repeat_interleave(batch.cu_seqlens.diff().long())
            for into, values in ((sums, losses * batch.loss_mask), (counts, batch.loss_mask)):
                total = torch.zeros(batch.cu_seqlens.numel() - 1, dtype=torch.float64, device=values.device)
                into.append(total.index_add_(0, document, values.double()).cpu())
        local = torch.stack([torch.cat(sums), torch.cat(counts)])
        everyone: list[Tensor] = [local] * parallel_state.get_data_parallel_world_size()
        dist.all_gather_object(everyone, local, group=parallel_state.get_data_parallel_group())
        all_sums, all_counts = torch.cat(everyone, dim=1)
        scored = all_counts > 0  # a document of one token has nothing to predict
        return all_sums[scored], all_counts[scored]
