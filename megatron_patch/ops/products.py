"""Matrix products of two dense fp32 matrices on a CPU, by whichever of PyTorch's libraries is the faster there.

PyTorch multiplies fp32 matrices on x86 by MKL, which on AMD processors leaves the upper half of AVX-512 registers unused; oneDNN,
which comes with PyTorch as well and multiplies its bf16 matrices, does not. Measured on an AMD EPYC of family 26, one thread, 512 x
128 by 128 x 2,048: 103 GFLOP/s by MKL, 240 by oneDNN, results equal. `benchmarks/products.py` measures it anew.
"""

import functools

import torch
from torch import Tensor

from megatron_patch.ops.reference import wide


@functools.cache
def _onednn_is_wider() -> bool:
    """Whether this processor has AVX-512 and PyTorch its oneDNN operator."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
    return wide and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _dense(x: Tensor) -> bool:
    """Rows, or columns, without gaps: of other strides oneDNN falls back to a loop that is hundreds of times slower."""
    return x.is_contiguous() or x.T.is_contiguous()


def product(left: Tensor, right: Tensor) -> Tensor:
    """left [M, K] . right [N, K] over K: [M, N], a new tensor. NaN and infinities spread as in `left @ right.T`. No autograd.

    Raises:
        RuntimeError: from PyTorch, of shapes that do not fit or unequal dtypes.
    """
    fast = left.dtype == torch.float32 == right.dtype and left.device.type == "cpu" and min(left.numel(), right.numel()) > 0
    if fast and _onednn_is_wider() and torch.backends.mkldnn.enabled and _dense(left) and _dense(right):
        return torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return left @ right.T


def head(x: Tensor, h: int) -> Tensor:
    """One head of x [T, H, D] as a factor: [T, D], in the precision of the maths, without gaps."""
    return wide(x[:, h]).contiguous()
