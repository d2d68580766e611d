"""Rotary position embeddings of DeepSeek-V2 and V3.2, with every number an explicit argument.

One model uses two layouts of the same rotation, and mixing them up is silent:

* MLA's `q_pe` and `k_pe` are **interleaved**: dims (0, 1), (2, 3), ... are the rotated pairs;
* the lightning indexer is **half-split** (NeoX): dims (0, R/2), (1, R/2 + 1), ... of its FIRST R dims are the pairs,
  and the dims behind them carry no position.

Shape letters: T tokens, R rotated dims, D dims of a head (D >= R); `...` any middle dims, e.g. heads.
"""

import math

import torch
from torch import Tensor


def rope_cos_sin(
    positions: Tensor,
    rope_dim: int,
    *,
    theta: float,
    kind: str = "default",
    factor: float = 1.0,
    original_max_positions: int = 4096,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    mscale: float = 1.0,
    mscale_all_dim: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotation angles, each fp32 [T, R/2], times YaRN's attention factor.

    Args:
        positions: [T], integer positions inside each document (they restart at 0 with every packed document).
        rope_dim: R, even.
        theta, kind, factor, ...: as in `rope_frequencies`.
    """
    inv_freq_R, attention_factor = rope_frequencies(
        rope_dim,
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_positions=original_max_positions,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
    )
    if positions.dim() != 1:
        raise ValueError(f"positions must be [T]: got shape {tuple(positions.shape)}")
    angle_TR = positions.to(torch.float32)[:, None] * inv_freq_R.to(positions.device)
    return angle_TR.cos() * attention_factor, angle_TR.sin() * attention_factor


def rope_frequencies(
    rope_dim: int,
    *,
    theta: float,
    kind: str = "default",
    factor: float = 1.0,
    original_max_positions: int = 4096,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    mscale: float = 1.0,
    mscale_all_dim: float = 0.0,
) -> tuple[Tensor, float]:
    """Inverse frequencies (fp32 [R/2], radians per position) and the factor on cosine and sine.

    "yarn" (arXiv 2309.00071, section 3.2): fast dims keep their frequency, slow ones are divided by `factor`, a linear
    ramp lies between; its ends are the dims that turn `beta_fast` and `beta_slow` times in `original_max_positions`.
    The arithmetic is that of transformers' `_compute_yarn_parameters`, in fp32. Note the attention factor when
    `mscale` or `mscale_all_dim` is 0: it is `0.1 ln(factor) + 1`, not a ratio. V2-Lite's two equal values give 1.

    Raises:
        ValueError: odd `rope_dim`, or an unknown `kind`.
    """
    if rope_dim < 2 or rope_dim % 2:
        raise ValueError(f"rope_dim must be even and positive: got {rope_dim}")
    frequency_R = theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)
    if kind == "default":
        return 1.0 / frequency_R, 1.0
    if kind != "yarn":
        raise ValueError(f"rope kind must be 'default' or 'yarn': got {kind!r}")

    def turning_dim(turns: float) -> float:  # the dim that makes `turns` full turns in the original context
        return rope_dim * math.log(original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(turning_dim(beta_fast)), 0)
    high = min(math.ceil(turning_dim(beta_slow)), rope_dim - 1)
    width = (high - low) or 0.001  # a ramp of width 0 is a step
    ramp_R = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep_R = 1 - ramp_R
    # Kept in this form, not simplified: it rounds as transformers does.
    inv_freq_R = (1.0 / (factor * frequency_R)) * (1 - keep_R) + (1.0 / frequency_R) * keep_R
    if mscale and mscale_all_dim:
        return inv_freq_R, _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return inv_freq_R, _yarn_mscale(factor, 1.0)


def apply_rope_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dims of the last axis, half-split (the indexer's layout); the other dims pass through.

    Args:
        x: [T, ..., D], tokens first, any float dtype. The rotation is computed in fp32 (fp64 for fp64 input).
        cos, sin: [T, R/2].

    Returns:
        [T, ..., D] in x's dtype.
    """
    cos, sin = _align(x, cos, sin)
    half = cos.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


def apply_rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate all dims of the last axis in neighbouring pairs (MLA's layout); the pairs stay where they are.

    Args:
        x: [T, ..., R], tokens first, any float dtype. The rotation is computed in fp32 (fp64 for fp64 input).
        cos, sin: [T, R/2].

    Returns:
        [T, ..., R] in x's dtype. (megatron-core and `deepseek_v32` of transformers return the pairs de-interleaved; a
        permutation common to query and key, so scores are the same.)
    """
    cos, sin = _align(x, cos, sin)
    if x.shape[-1] != 2 * cos.shape[-1]:
        raise ValueError(f"interleaved rope rotates all dims: x has {x.shape[-1]}, cos has {cos.shape[-1]} pairs")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    even, odd = wide[..., 0::2], wide[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _align(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[T, R/2] -> [T, 1, ..., R/2]: the token axis is matched by name, never by broadcasting luck."""
    if cos.dim() != 2 or cos.shape != sin.shape or x.dim() < 2 or x.shape[0] != cos.shape[0]:
        raise ValueError(
            f"x must be [T, ..., D] and cos, sin [T, R/2]: got {tuple(x.shape)}, {tuple(cos.shape)}, {tuple(sin.shape)}"
        )
    if x.shape[-1] < 2 * cos.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} dims, fewer than the {2 * cos.shape[-1]} that cos rotates")
    shape = (cos.shape[0], *[1] * (x.dim() - 2), cos.shape[1])
    return cos.reshape(shape), sin.reshape(shape)
