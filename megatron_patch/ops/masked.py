"""Attention of a chunk of queries over all keys up to the last of them, those that a query may not see masked away.

With G = d loss / d out, per head, and the probabilities P computed again from the logits:

    dV = P^T G;  dP = G V^T;  d logit = P * (dP - rowsum(P * dP));  dQ = scale * d logit K;  dK = scale * d logit^T Q

The softmax is normalised again in the backward pass instead of by a saved log-sum-exp: at logits of 1e5, which fp32
resolves to 1e-2, exp(logit - log-sum-exp) would not sum to 1.

Shape letters: those of reference.py, and C queries of a chunk, K keys that they may see.
"""

import torch
from torch import Tensor

from megatron_patch.ops.reference import wide


def logits(query_CHD: Tensor, key_KHD: Tensor, softmax_scale: float, allowed_CK: Tensor) -> Tensor:
    """Scaled logits [H, C, K], -inf where not allowed."""
    logit_HCK = torch.bmm((wide(query_CHD) * softmax_scale).transpose(0, 1), wide(key_KHD).permute(1, 2, 0))
    return logit_HCK.add_(additive(allowed_CK, logit_HCK.dtype))


def additive(allowed_CK: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed, else -inf: on a CPU, adding it to all heads is 50 times as fast as filling by a mask."""
    return torch.zeros(allowed_CK.shape, dtype=dtype, device=allowed_CK.device).masked_fill_(~allowed_CK, float("-inf"))


def output_and_target(logit_HCK: Tensor, value_KHV: Tensor) -> tuple[Tensor, Tensor]:
    """(out [C, H, V], p [C, K]: probabilities summed over heads and normalised). Overwrites the logits."""
    prob_HCK = torch.softmax(logit_HCK, -1, out=logit_HCK)
    out_HCV = torch.bmm(prob_HCK, wide(value_KHV).transpose(0, 1))
    target_CK = prob_HCK.sum(0)
    return out_HCV.transpose(0, 1), target_CK / target_CK.sum(-1, keepdim=True)


def dense_mass(logit_HCK: Tensor, selected_CK: Tensor) -> Tensor:
    """[C]: the mass (mean over heads) that attention by these logits gives to the selected keys."""
    return (logit_HCK.softmax(-1).mean(0) * selected_CK).sum(-1)


def attention_gradients(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed_CK: Tensor,
    softmax_scale: float,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Gradients of a chunk of queries.

    Args:
        d_out: [C, H, V].
        query: [C, H, D].
        key, value: [K, H, D] and [K, H, V].
        allowed_CK: bool.
        into: d_query [C, H, D], written in its dtype; d_key [K, H, D] and d_value [K, H, V], wide, added to.
    """
    d_query, d_key, d_value = into
    prob_HCK = logits(query, key, softmax_scale, allowed_CK)
    torch.softmax(prob_HCK, -1, out=prob_HCK)
    d_out_HCV = wide(d_out).transpose(0, 1)
    d_value.transpose(0, 1).baddbmm_(prob_HCK.transpose(1, 2), d_out_HCV)
    d_logit_HCK = torch.bmm(d_out_HCV, wide(value).permute(1, 2, 0)).mul_(prob_HCK)
    d_logit_HCK.addcmul_(prob_HCK, d_logit_HCK.sum(-1, keepdim=True), value=-1)
    del prob_HCK
    d_query.copy_(torch.bmm(d_logit_HCK, wide(key).transpose(0, 1)).mul_(softmax_scale).transpose(0, 1))
    query_HCD = wide(query).transpose(0, 1)
    d_key.transpose(0, 1).baddbmm_(d_logit_HCK.transpose(1, 2), query_HCD, alpha=softmax_scale)
