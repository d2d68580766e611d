"""What the training step tells the DSA layers, and what they report back."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

DENSE, SPARSE = "dense", "sparse"


@dataclass
class Recorded:
    """What a layer's forward pass over one micro-batch depended on, so that it can be run again, for its gradients.

    By then the state may be another micro-batch's. The selection is kept too: scores that differ in the last digits, as
    kernels that sum in any order give them, could choose other keys the second time.
    """

    stage: str
    kl_grad_scale: float
    counted: Tensor | None
    indices: Tensor | None = None


@dataclass
class DsaState:
    """Shared by the DSA layers of one model and its training step.

    Attributes:
        stage: "dense" (warm-up: attention and KL over all keys) or "sparse" (both over the selected keys).
        kl_grad_scale: what one unit of a layer's summed KL weighs in the gradient: coefficient / counted tokens of
            the global batch, times the factors that megatron-core divides by. Zero outside training.
        counted: bool [T], the real (non-padding) tokens of the micro-batch at hand; None: all.
        recall: whether the layers compute their recall, which in the sparse stage costs the logits of dense attention.
        bypassed: layers (0-based, global numbers) that pass their input through: participation, and the base's loss.
        kept: losses of base layers' indexers in the micro-batch at hand, which `attach_kept` hands to the backward pass.
        observer: if set, called by base layers with an indexer: (layer, query, key, IndexInputs, cu_seqlens, softmax_scale).
        recorded: where the layer that runs leaves its selection; None: nobody asks.
        replays: whether the layer that runs does so a second time, from `recorded`, and reports nothing.
        kl_sum, recall_sum, tokens: per layer, sums since `reset`, fp64 on the device of the layer.
    """

    stage: str = SPARSE
    kl_grad_scale: float = 0.0
    counted: Tensor | None = None
    recall: bool = True
    bypassed: frozenset[int] = frozenset()
    kept: list[Tensor] = field(default_factory=list)
    observer: Callable[..., None] | None = None
    recorded: Recorded | None = None
    replays: bool = False
    kl_sum: dict[int, Tensor] = field(default_factory=dict)
    recall_sum: dict[int, Tensor] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget the sums, at the start of a step."""
        self.kl_sum.clear()
        self.recall_sum.clear()
        self.tokens.clear()

    @contextlib.contextmanager
    def recording(self, record: Recorded, *, again: bool) -> Iterator[None]:
        """Run a layer into `record`, or (`again`) from it; afterwards the state is as it was."""
        names = ("stage", "kl_grad_scale", "counted", "recorded", "replays")
        before = {name: getattr(self, name) for name in names}
        self.stage, self.kl_grad_scale, self.counted = record.stage, record.kl_grad_scale, record.counted
        self.recorded, self.replays = record, again
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def attach_kept(self, output: Tensor) -> Tensor:
        """The model's output, whose backward pass also starts that of every kept loss. A frozen model has no other."""
        if self.kept:
            output = AttachLoss.apply(output, torch.stack(self.kept).sum(), self.kl_grad_scale)
            self.kept.clear()
        return output

    def report(self, layer: int, kl: Tensor, recall: Tensor | None, tokens: int) -> None:
        """Add a layer's sums over one micro-batch; those of a pass that is run again stand already. No recall is NaN."""
        if self.replays:
            return
        self.kl_sum[layer] = self.kl_sum.get(layer, 0) + kl.detach().double()
        self.recall_sum[layer] = self.recall_sum.get(layer, 0) + (
            kl.new_full((), float("nan"), dtype=torch.float64) if recall is None else recall.detach().double()
        )
        self.tokens[layer] = self.tokens.get(layer, 0) + tokens

    def means(self, add_up: Callable[[list[float]], list[float]] | None = None) -> tuple[float, float] | None:
        """(KL in nats per token, recalled attention mass), each a mean over tokens and layers; None: nothing reported.

        The mass is NaN where the layers were not asked for it.

        Args:
            add_up: sums each number over the ranks that share the tokens; all of them call `means` then.
        """
        sums = [float(each[layer]) for each in (self.kl_sum, self.recall_sum, self.tokens) for layer in sorted(self.tokens)]
        if add_up is not None:
            sums = add_up(sums)
        n = len(sums) // 3
        layers = [row for row in zip(sums[:n], sums[n : 2 * n], sums[2 * n :], strict=True) if row[2]]
        if not layers:
            return None
        return sum(kl / tokens for kl, _, tokens in layers) / len(layers), sum(
            recall / tokens for _, recall, tokens in layers
        ) / len(layers)


class AttachLoss(torch.autograd.Function):
    """Returns `output` unchanged and, in the backward, sends `scale` to `loss`, as if loss * scale were added.

    The indexer's loss thus needs no path through the layers above, and holds under recomputation and pipelines.
    """

    @staticmethod
    def forward(ctx, output: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype, ctx.device = scale, loss.dtype, loss.device
        return output

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return grad_output, torch.full((), ctx.scale, dtype=ctx.dtype, device=ctx.device), None
