"""Small modules that a spec can name on every device: RMSNorm, LayerNorm in fp32, duplicated linear."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """RMS normalisation over the last dimension, statistics in fp32, as DeepSeek's.

    megatron-core's `WrappedTorchNorm` refuses sequence parallelism; this one marks its weight, whose gradient is then
    summed over the tensor-parallel ranks.

    Args:
        config: a megatron-core TransformerConfig (`params_dtype`, `sequence_parallel`).
        hidden_size: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config, hidden_size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        # The order of casts is DeepSeek's: normalise in fp32, round, then scale. In fp32 nothing changes.
        normed = F.rms_norm(x.float(), (x.size(-1),), eps=self.eps).to(x.dtype)
        return self.weight * normed


class Fp32LayerNorm(nn.Module):
    """LayerNorm with bias, computed in fp32 from parameters of any dtype; returns fp32.

    The lightning indexer's `k_norm` (DeepSeek-V3.2's reference: eps 1e-6, fp32).
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] of any dtype -> fp32."""
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), self.bias.float(), self.eps)


class DuplicatedLinear(nn.Module):
    """A linear map without bias whose weight is whole on every tensor-parallel rank.

    The stand-in for `TELinear(parallel_mode="duplicated")`, which megatron-core has only with Transformer Engine; the
    builder registers it with MLA. Its weight takes part in the sequence-parallel gradient sum, because each rank sees
    its own part of the sequence.

    Raises:
        ValueError: a feature of TELinear that is not implemented here.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config,
        init_method=None,
        bias: bool = False,
        parallel_mode: str = "duplicated",
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group=None,
    ):
        super().__init__()
        if parallel_mode != "duplicated" or bias or is_expert or skip_weight_param_allocation:
            raise ValueError(
                f"DuplicatedLinear is a plain duplicated map: got parallel_mode={parallel_mode!r}, bias={bias}, "
                f"is_expert={is_expert}, skip_weight_param_allocation={skip_weight_param_allocation}"
            )
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        if init_method is not None and config.perform_initialization:
            init_method(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[..., input_size] -> ([..., output_size], no bias), as megatron-core's linears return."""
        return F.linear(x, self.weight), None
