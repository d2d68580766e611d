"""A DSA layer's attention written out from Hugging Face's weights, our rope and our op: the forward pass as maths."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from megatron_patch.ops import reference, rope


def dsa_layer(
    weights: dict[str, Tensor],
    x: Tensor,
    cu_seqlens: Tensor,
    *,
    heads: int,
    rope_parameters: dict,
    topk: int,
    **options,
) -> tuple[Tensor, reference.DsaOutput, tuple[Tensor, Tensor, Tensor]]:
    """Attention over packed documents, sizes read off the weights.

    Args:
        weights: of `self_attn`: q_a_proj.weight, ..., indexer.weights_proj.weight.
        x: [T, hidden], already normed.
        rope_parameters: as in a transformers 5 configuration.
        options: passed to the op.

    Returns:
        [T, hidden], the op's own result, and (index_query, index_key, index_weights).
    """
    w, t = {n.removesuffix(".weight"): p for n, p in weights.items()}, x.shape[0]
    latent_dim = w["kv_a_layernorm"].shape[0]
    rope_dim = w["kv_a_proj_with_mqa"].shape[0] - latent_dim
    nope_dim, value_dim = w["q_b_proj"].shape[0] // heads - rope_dim, w["o_proj"].shape[1] // heads
    index_heads, index_dim = w["indexer.weights_proj"].shape[0], w["indexer.wk"].shape[0]

    yarn = rope_parameters["rope_type"] == "yarn"
    names = {"factor": "factor", "original_max_positions": "original_max_position_embeddings", "mscale": "mscale"}
    names |= {"mscale_all_dim": "mscale_all_dim", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
    numbers = {ours: rope_parameters[theirs] for ours, theirs in names.items()} if yarn else {}
    positions = torch.cat([torch.arange(end - begin) for begin, end in pairwise(cu_seqlens.tolist())])
    kind, theta = rope_parameters["rope_type"], rope_parameters["rope_theta"]
    cos, sin = rope.rope_cos_sin(positions, rope_dim, theta=theta, kind=kind, **numbers)

    def rms(v: Tensor, name: str) -> Tensor:
        return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6) * w[name]

    q_latent = rms(x @ w["q_a_proj"].T, "q_a_layernorm")
    q_nope, q_rope = (q_latent @ w["q_b_proj"].T).view(t, heads, -1).split([nope_dim, rope_dim], -1)
    latent, k_rope = (x @ w["kv_a_proj_with_mqa"].T).split([latent_dim, rope_dim], -1)
    latent = rms(latent, "kv_a_layernorm")
    k_nope, value = (latent @ w["kv_b_proj"].T).view(t, heads, -1).split([nope_dim, value_dim], -1)
    query = torch.cat([q_nope, rope.apply_rope_interleaved(q_rope, cos, sin)], -1)
    key = torch.cat([k_nope, rope.apply_rope_interleaved(k_rope, cos, sin)[:, None].expand(-1, heads, -1)], -1)

    index_query = (q_latent @ w["indexer.wq_b"].T).view(t, index_heads, index_dim)
    norm = (index_dim,), w["indexer.k_norm"], weights["indexer.k_norm.bias"], 1e-6
    index_key = torch.nn.functional.layer_norm(x @ w["indexer.wk"].T, *norm)
    index = (
        rope.apply_rope_half_split(index_query, cos, sin),
        rope.apply_rope_half_split(index_key, cos, sin),
        x @ w["indexer.weights_proj"].T * (index_heads * index_dim) ** -0.5,
    )
    scale = (nope_dim + rope_dim) ** -0.5
    if yarn:
        scale *= (0.1 * rope_parameters["mscale_all_dim"] * math.log(rope_parameters["factor"]) + 1) ** 2
    result = reference.dsa_attention(query, key, value, *index, cu_seqlens, topk=topk, softmax_scale=scale, **options)
    return result.out.reshape(t, -1) @ w["o_proj"].T, result, index
