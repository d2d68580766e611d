"""Watch the experts of a transformers model: who was chosen, with what weight, and how large the output was.

Every MoE block of the known families calls `experts(hidden [T, D], top_k_index [T, K], top_k_weights [T, K])`, so one
place sees the choice and the weights as applied, whatever the router (softmax, sigmoid with groups, hash).

Shape letters: T tokens of a batch, K experts of a token, D hidden size, L MoE layers, E experts of a layer.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_patch.errors import UserError
from megatron_patch.pruning.moe_layers import MoeLayers
from megatron_patch.pruning.statistics import SourceStatistics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]
_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\.mlp\.experts$")


def moe_blocks(model: nn.Module) -> dict[int, nn.Module]:
    """The blocks that hold `gate` and `experts`, by layer, ascending."""
    found = {}
    for name, _ in model.named_modules():
        if match := _EXPERTS.search(name):
            found[int(match[1])] = model.get_submodule(name.removesuffix(".experts"))
    return dict(sorted(found.items()))


class ExpertObserver:
    """Within a `with` block, forward passes of the model are counted. The model computes what it did before.

    The experts run one at a time, so that only one expert's outputs exist at once, and only their norms are kept.

    Attributes:
        statistics: the sums so far, on the CPU.
        real: bool [T], which tokens of the next forward pass are no padding; set it before each.

    Raises:
        UserError: the model's MoE layers are not those of its config.
    """

    def __init__(self, model: "PreTrainedModel", layers: MoeLayers):
        blocks = moe_blocks(model)
        if tuple(blocks) != layers.layers:
            raise UserError(
                f"the MoE layers must be those of config.json: it says {layers.layers}, the model has {tuple(blocks)}; "
                "mend first_k_dense_replace"
            )
        self._experts = [block.experts for block in blocks.values()]
        self._top_k = layers.top_k
        self.statistics = SourceStatistics.zeros(len(blocks), layers.num_experts)
        self.real: Tensor | None = None

    def __enter__(self) -> "ExpertObserver":
        self._stack = ExitStack()
        for row, experts in enumerate(self._experts):
            self._stack.enter_context(replaced_forward(experts, self._observed(row, experts.forward)))
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def count_tokens(self, tokens: int) -> None:
        """Add to the tokens seen, once a forward pass is through."""
        self.statistics = dataclasses.replace(self.statistics, tokens=self.statistics.tokens + tokens)

    def _observed(self, row: int, run: ExpertsForward) -> ExpertsForward:
        def forward(hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
            out_TD, norm_TK = one_expert_at_a_time(run, hidden_TD, index_TK, weight_TK)
            self._add(row, index_TK, weight_TK, norm_TK)
            return out_TD

        return forward

    def _add(self, row: int, index_TK: Tensor, weight_TK: Tensor, norm_TK: Tensor) -> None:
        # On the CPU in fp64: an accelerator may have none, and adds in an order of its own.
        real = self.real
        index = index_TK.cpu()[real].flatten().long()
        gate = weight_TK.cpu()[real].flatten().double()
        value = gate * norm_TK.cpu()[real].flatten().double()
        sums = self.statistics
        sums.count[row] += torch.bincount(index, minlength=sums.count.shape[1])
        sums.gate_sum[row].index_add_(0, index, gate)
        sums.gate_norm_sum[row].index_add_(0, index, value)
        sums.gate_norm_square[row].index_add_(0, index, value.square())
        sums.gate_norm_max[row].scatter_reduce_(0, index, value, "amax")


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give a module another `forward` within the block. One that it had of its own (accelerate's) comes back."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward  # the class's is seen again
        else:
            module.forward = before


def one_expert_at_a_time(
    run: ExpertsForward, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """The experts' output, and the norm of each chosen expert's output before its weight.

    Asks the model's own implementation (activation, clamping, FP8 weights) for one expert at a time with weight 1, and
    then does what transformers' eager loop does, in its order: equal to it bit for bit.

    Args:
        run: the `forward` of the experts.

    Returns:
        [T, D] in the dtype of `hidden_TD`, and fp32 [T, K].
    """
    out_TD = torch.zeros_like(hidden_TD)
    norm_TK = torch.zeros(index_TK.shape, dtype=torch.float32, device=hidden_TD.device)
    for expert in index_TK.unique().tolist():  # ascending
        # In the eager loop's order: how a row's matrix product is rounded may depend on its place.
        place, token = index_TK.T.eq(expert).nonzero(as_tuple=True)
        only = torch.full((len(token), 1), expert, dtype=index_TK.dtype, device=index_TK.device)
        alone = run(hidden_TD[token], only, weight_TK.new_ones(len(token), 1))
        norm_TK[token, place] = alone.float().norm(dim=-1)
        out_TD.index_add_(0, token, (alone * weight_TK[token, place, None]).to(out_TD.dtype))
    return out_TD, norm_TK
