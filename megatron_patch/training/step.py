"""One optimizer step: micro-batches through megatron-core's schedule, losses normalised over the global batch."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_patch.data.batch import PackedBatch
from megatron_patch.devices.device import Device
from megatron_patch.model.builder import forward_pack
from megatron_patch.model.dsa_state import DENSE, DsaState
from megatron_patch.planning.flops import FlopsCounter
from megatron_patch.training.optimizer import gradients_are_finite
from megatron_patch.training.trunk_cache import CachedTrunk


@dataclass(frozen=True)
class StepResult:
    """What one step did. Losses are means over the tokens of the global batch, in nats.

    `indexer_kl` and `index_recall` are means over DSA layers too; the recall is NaN unless the state asked for it.
    `grad_norm` is before clipping. A skipped step changed no parameter; `losses` are then this rank's, each summed over the tokens
    of a micro-batch. `flops` are the model's, over all ranks (`planning.flops`),
    without those that the trunk cache saved; `trunk_cached` is the share of the tokens that it served, None without one.
    """

    lm_loss: float
    indexer_kl: float
    index_recall: float
    grad_norm: float
    tokens: int
    seconds: float
    skipped: bool
    flops: int
    losses: tuple[float, ...] = ()
    trunk_cached: float | None = None


class TrainStep:
    """Calling it with the micro-batches of a step runs the step.

    The LM loss is a mean over the supervised tokens of the *global* batch, and the indexer's KL a mean over its real
    tokens, so that neither depends on how samples fall into micro-batches. megatron-core divides the loss by the
    number of micro-batches, and DDP the gradients by the number of ranks; both factors are put in beforehand.

    Args:
        model: wrapped in DDP.
        optimizer: of the trainable parameters.
        state: the DSA layers'.
        device: activated.
        coefficient: weight of the indexers' KL; 0 leaves their gradients zero.
        flops: counts the model's FLOPs.
        trunk: gives the frozen trunk's output; None: it is computed with the rest.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        state: DsaState,
        device: Device,
        coefficient: float,
        flops: FlopsCounter,
        trunk: CachedTrunk | None = None,
    ):
        self.model, self.optimizer, self.state, self.device = model, optimizer, state, device
        self.coefficient, self.flops, self.trunk = coefficient, flops, trunk
        self.forward_backward = get_forward_backward_func()
        self.ranks = parallel_state.get_data_parallel_world_size()

    def __call__(self, batches: list[PackedBatch], stage: str) -> StepResult:
        """Run one step.

        Args:
            batches: this rank's micro-batches.
            stage: of the DSA layers, "dense" or "sparse".
        """
        start = time.perf_counter()
        lengths = [n for b in batches for n in b.cu_seqlens.diff().tolist()]
        supervised, real = sum_over_ranks(
            [sum(float(b.loss_mask.sum()) for b in batches), sum(int(b.valid.sum()) for b in batches)], self.device
        )
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.state.reset()
        self.state.stage = stage
        self.state.kl_grad_scale = self.coefficient * self.ranks / max(real, 1)
        if self.trunk is not None:
            self.trunk.begin_step(batches)
        losses = self._run(batches, self.ranks * len(batches) / max(supervised, 1))
        self.state.kl_grad_scale = 0.0
        computed = [] if self.trunk is None else [self.trunk.computed]
        flops = self.flops(lengths, stage == DENSE, *computed).total
        lm_loss, flops, in_trunk = sum_over_ranks([float(sum(losses)), flops, float(sum(map(sum, computed)))], self.device)
        lm_loss /= max(supervised, 1)
        skipped = not (torch.isfinite(torch.tensor(lm_loss)) and gradients_are_finite(self.model))
        grad_norm = float("nan") if skipped else float(self.optimizer.step()[1])
        kl, recall = self.state.means(partial(sum_over_ranks, device=self.device)) or (float("nan"), float("nan"))
        self.device.synchronize()
        seconds = time.perf_counter() - start
        cached = None if self.trunk is None else 1 - in_trunk / max(real, 1)
        of_batches = tuple(map(float, losses)) if skipped else ()
        return StepResult(lm_loss, kl, recall, grad_norm, int(real), seconds, skipped, int(flops), of_batches, cached)

    def _run(self, batches: list[PackedBatch], loss_scale: float) -> list[Tensor]:
        """Forward and backward of all micro-batches; returns each one's summed LM loss."""

        def forward_step(iterator: Iterator[PackedBatch], model):
            taken = next(iterator)
            batch = taken.to(self.device.torch_device)
            self.state.counted = batch.valid
            if self.trunk is None:
                losses = forward_pack(model, batch.tokens, batch.cu_seqlens, batch.labels)
            else:
                losses = self.trunk.forward(model, taken, batch)
            losses = self.state.attach_kept(losses)

            def loss_func(losses: Tensor) -> tuple[Tensor, Tensor]:
                total = (losses * batch.loss_mask).sum()
                # The schedule divides what is returned in place: report a copy.
                return total * loss_scale, total.detach().clone()

            return losses, loss_func

        return self.forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=max(b.tokens.numel() for b in batches),
            micro_batch_size=1,
            forward_only=False,
        )


def sum_over_ranks(values: list[float], device: Device) -> list[float]:
    """Each value's sum over the data-parallel ranks, which hold different tokens; fp64."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device.sums_device)
    dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group())
    return tensor.tolist()
