"""Matrix products of two dense fp32 matrices on a CPU, by whichever of PyTorch's libraries is the faster there.

PyTorch multiplies fp32 matrices on x86 by MKL, which on an AMD processor with AVX-512 reaches less than half the rate of oneDNN; that
comes with PyTorch as well, for its bf16 matrices. Measured on an AMD EPYC of family 26, one thread, 512 x 128 by 128 x 2,048:
103 GFLOP/s by MKL, 240 by oneDNN, results equal. `benchmarks/products.py` measures it anew.
"""

import functools

import torch
from torch import Tensor

from megatron_patch.ops.reference import wide


@functools.cache
def _onednn_is_wider() -> bool:
    """Whether this processor has AVX-512 and PyTorch its oneDNN operator. (Not measured on Intel's, where MKL uses AVX-512 as well.)"""
    avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
    return avx512 and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _takes(left: Tensor, right: Tensor) -> bool:
    """Rows, or columns, without gaps: of others oneDNN falls back to a loop that is hundreds of times slower, but for left rows."""
    return (left.stride(1) == 1 or left.T.is_contiguous()) and (right.is_contiguous() or right.T.is_contiguous())


def product(left: Tensor, right: Tensor, regular: bool) -> Tensor:
    """left [M, K] . right [N, K] over K: [M, N], a new tensor. NaN and infinities spread as in `left @ right.T`. No autograd.

    Args:
        regular: whether the shape is one of a few. oneDNN compiles a kernel for each that it meets, 1 ms, and keeps it, 1 MB: of
            documents of all lengths, a gigabyte. To be told from the shape alone, lest a resumed run rounds otherwise.

    Raises:
        RuntimeError: from PyTorch, of shapes that do not fit or unequal dtypes.
    """
    fast = regular and left.dtype == torch.float32 == right.dtype and left.device.type == "cpu" and min(left.numel(), right.numel()) > 0
    if fast and _onednn_is_wider() and torch.backends.mkldnn.enabled and _takes(left, right):
        return torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return left @ right.T


def rounded(keys: int, step: int, most: int) -> int:
    """The next multiple of `step`, but at most `most`: of products whose widths grow with a query's position, few shapes."""
    return min(most, -(-keys // step) * step)


def head(x: Tensor, h: int) -> Tensor:
    """One head of x [T, H, D] as a factor: [T, D], in the precision of the maths, without gaps."""
    return wide(x[:, h]).contiguous()
