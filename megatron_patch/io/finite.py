"""Whether numbers are finite, found fast."""

import torch
from torch import Tensor


def all_finite(tensor: Tensor) -> bool:
    """Whether a floating tensor holds neither NaN nor infinity.

    Both ends of its range are NaN where one entry is, and infinite where one is: one pass, where isfinite makes five.
    """
    return not tensor.numel() or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
