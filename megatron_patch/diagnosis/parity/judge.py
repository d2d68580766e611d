"""An independent implementation of every module of a DeepSeek decoder, one function each, from published weights.

It judges what a trainer or an engine recorded: each module is computed from that side's *own* input of the module, so
that a difference belongs to this module alone and no error travels upwards. In fp64 it is the truth; in the side's
dtype its distance from the truth is what rounding explains. A `Variant` plants a known fault.

Written from the DeepSeek-V2 (arXiv 2405.04434) and V3.2 reports; it shares no code with the trainer's modules, with
`ops` or with the exported model but the table of RoPE frequencies, which `ops.rope` checks against transformers.

Shape letters: T tokens, D hidden, H heads, N unrotated and R rotated dims of a head, V dims of a value, L latent rank,
J index heads, E dims of an index head, X experts, K experts of a token.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_patch.diagnosis.parity.weights_reader import LayerWeights, ModelShape
from megatron_patch.ops.rope import rope_cos_sin


@dataclass(frozen=True)
class Variant:
    """Deviations from the definition; the default has none.

    Attributes:
        index_rope: how the indexer rotates: the first dims half-split, the first dims in neighbouring pairs, or the last
            dims half-split.
        index_latent_normed: whether index queries come from the normed latent.
        k_norm_eps, k_norm_bias: of the indexer's LayerNorm.
        softmax_mscale: whether YaRN's factor is in the softmax scale.
        rope_mscale: another factor on the cosines and sines of MLA; None: the right one.
        query_shift: positions by which queries are ahead of their keys.
        isolate: documents do not see each other. If not, `restart` says whether positions start again with each.
        router_rounds: to bf16: the router's "logits" alone, or its "inputs", weights and logits.
        router_score: another score function.
        router_bias: whether the selection bias is used.
        renormalise: weights of the chosen experts sum to 1; None: as config.json says.
        shared_factor: on the shared experts' output.
        expert_map: expert -> the expert whose weights it has.
    """

    index_rope: Literal["half_split", "interleaved", "last"] = "half_split"
    index_latent_normed: bool = True
    k_norm_eps: float = 1e-6
    k_norm_bias: bool = True
    softmax_mscale: bool = True
    rope_mscale: float | None = None
    query_shift: int = 0
    isolate: bool = True
    restart: bool = True
    router_rounds: Literal["logits", "inputs"] | None = None
    router_score: Literal["softmax", "sigmoid"] | None = None
    router_bias: bool = True
    renormalise: bool | None = None
    shared_factor: float = 1.0
    expert_map: dict[int, int] = field(default_factory=dict)


RIGHT = Variant()


@dataclass(frozen=True)
class Pack:
    """Where documents lie: `document` and `position` int64 [T], `allowed` bool [T, T] (causal, own document)."""

    document: Tensor
    position: Tensor
    allowed: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> "Pack":
        """From document boundaries, int [n + 1]."""
        lengths = cu_seqlens.long().diff()
        document = torch.repeat_interleave(lengths)
        position = torch.arange(len(document)) - cu_seqlens.long()[:-1][document]
        return cls(document, position, _causal(document))


def _causal(document: Tensor) -> Tensor:
    t = torch.arange(len(document))
    return (t[None] <= t[:, None]) & (document[None] == document[:, None])


class Judge:
    """Modules of one model.

    Args:
        shape: of the model, from its config.json.
        pack: the documents.
        dtype: of weights and activations; norms, softmaxes, index scores and the router are at least fp32.
        variant: what deviates.
        plain_queries: dense layers project queries from their input; in a native export's weights that projection stands
            behind a latent that equals the input.
    """

    def __init__(
        self,
        shape: ModelShape,
        pack: Pack,
        dtype: torch.dtype = torch.float64,
        variant: Variant = RIGHT,
        plain_queries: bool = False,
    ):
        self.shape, self.pack, self.dtype, self.variant, self.plain_queries = shape, pack, dtype, variant, plain_queries
        self.wide = torch.promote_types(dtype, torch.float32)

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), weight.to(self.dtype))

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """[T, D]: normalised in fp32 or wider, rounded, scaled."""
        x = x_TD.to(self.dtype).to(self.wide)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return weight_D.to(self.dtype) * x.to(self.dtype)

    def _rotation(self, shift: int = 0, mscale: float | None = None) -> tuple[Tensor, Tensor]:
        """cos, sin [T, R/2]."""
        v = self.variant
        position = self.pack.position if v.isolate or v.restart else torch.arange(len(self.pack.position))
        cos, sin = rope_cos_sin(position + shift, self.shape.rope_dim, **asdict(self.shape.rope))
        return cos * (mscale or 1.0), sin * (mscale or 1.0)

    def latent(self, x_TD: Tensor, w: LayerWeights, normed: bool = True) -> Tensor:
        """The query latent [T, rank]."""
        latent = self._linear(x_TD, w["self_attn.q_a_proj.weight"])
        return self.rms_norm(latent, w["self_attn.q_a_layernorm.weight"], self.shape.latent_eps) if normed else latent

    def index_scores(self, x_TD: Tensor, w: LayerWeights) -> Tensor:
        """[T, T] in fp32 or wider, without a mask. `x` is the attention's input, after the layer's norm."""
        v, s = self.variant, self.shape
        latent = self.latent(x_TD, w, v.index_latent_normed)
        q_TJE = self._linear(latent, w["self_attn.indexer.wq_b.weight"]).unflatten(-1, (s.index_heads, -1))
        k_TE = self._linear(x_TD, w["self_attn.indexer.wk.weight"]).to(self.wide)
        k_TE = (k_TE - k_TE.mean(-1, keepdim=True)) / (k_TE.var(-1, correction=0, keepdim=True) + v.k_norm_eps).sqrt()
        k_TE = k_TE * w["self_attn.indexer.k_norm.weight"].to(self.wide)
        if v.k_norm_bias:
            k_TE = k_TE + w["self_attn.indexer.k_norm.bias"].to(self.wide)
        q_TJE = self._index_rope(q_TJE, *self._rotation(v.query_shift)).to(self.dtype).to(self.wide)
        k_TE = self._index_rope(k_TE, *self._rotation()).to(self.dtype).to(self.wide)
        weights_TJ = x_TD.to(self.dtype).to(self.wide) @ w["self_attn.indexer.weights_proj.weight"].to(self.dtype).to(self.wide).T
        weights_TJ = weights_TJ * (s.index_heads * q_TJE.size(-1)) ** -0.5
        total = torch.zeros(len(x_TD), len(x_TD), dtype=self.wide)
        for j in range(s.index_heads):
            total += weights_TJ[:, j, None] * (q_TJE[:, j] @ k_TE.T).relu()
        return total

    def _index_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        r = self.shape.rope_dim
        x = x.to(self.wide)
        cos, sin = (t.to(self.wide).view(len(t), *[1] * (x.dim() - 2), -1) for t in (cos, sin))
        kind = self.variant.index_rope
        turned, rest = (x[..., -r:], x[..., :-r]) if kind == "last" else (x[..., :r], x[..., r:])
        if kind == "interleaved":
            turned = _turn_pairs(turned, cos, sin)
        else:
            a, b = turned.chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([rest, turned] if kind == "last" else [turned, rest], dim=-1)

    def attention(self, x_TD: Tensor, w: LayerWeights, selected_TT: Tensor | None) -> Tensor:
        """[T, D]: MLA with its output projection, over `selected` keys (bool [T, T]); None: a dense layer, all causal ones."""
        s, v = self.shape, self.variant
        if "self_attn.q_proj.weight" in w:
            q = self._linear(x_TD, w["self_attn.q_proj.weight"])
        elif selected_TT is None and self.plain_queries:
            q = self._linear(x_TD, w["self_attn.q_b_proj.weight"])
        else:
            q = self._linear(self.latent(x_TD, w), w["self_attn.q_b_proj.weight"])
        q_THQ = q.unflatten(-1, (s.heads, s.nope_dim + s.rope_dim))
        compressed = self._linear(x_TD, w["self_attn.kv_a_proj_with_mqa.weight"])
        latent, k_rope = compressed.split([s.kv_rank, s.rope_dim], dim=-1)
        latent = self.rms_norm(latent, w["self_attn.kv_a_layernorm.weight"], s.latent_eps)
        kv = self._linear(latent, w["self_attn.kv_b_proj.weight"]).unflatten(-1, (s.heads, s.nope_dim + s.value_dim))
        allowed = self.pack.allowed if selected_TT is None else selected_TT
        if not v.isolate:
            allowed = _causal(torch.zeros_like(self.pack.document))
        q_rope = self._mla_rope(q_THQ[..., s.nope_dim :], *self._rotation(v.query_shift, v.rope_mscale))
        k_rope = self._mla_rope(k_rope, *self._rotation(0, v.rope_mscale))
        scale = (s.nope_dim + s.rope_dim) ** -0.5 * (s.rope.softmax_mscale if v.softmax_mscale else 1.0)
        out = []
        for h in range(s.heads):
            score = q_THQ[:, h, : s.nope_dim] @ kv[:, h, : s.nope_dim].T + q_rope[:, h] @ k_rope.T
            score = (score.to(self.wide) * scale).masked_fill(~allowed, -math.inf)
            out.append(score.softmax(-1).to(self.dtype) @ kv[:, h, s.nope_dim :])
        return self._linear(torch.cat(out, dim=-1), w["self_attn.o_proj.weight"])

    def _mla_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = (t.to(self.wide).view(len(t), *[1] * (x.dim() - 2), -1) for t in (cos, sin))
        return _turn_pairs(x.to(self.wide), cos, sin).to(self.dtype)

    def router(self, x_TD: Tensor, w: LayerWeights) -> tuple[Tensor, Tensor]:
        """(weights [T, X], 0 for experts not chosen; choice scores [T, X] that decide, -inf where a group is closed)."""
        s, v = self.shape, self.variant
        x, gate = (t.to(self.dtype) for t in (x_TD, w["mlp.gate.weight"]))
        if v.router_rounds == "inputs":
            x, gate = x.bfloat16(), gate.bfloat16()
        logits = F.linear(x.to(self.wide), gate.to(self.wide))
        if v.router_rounds:
            logits = logits.bfloat16().to(self.wide)
        kind = v.router_score or s.router_score
        score_TX = logits.softmax(-1) if kind == "softmax" else logits.sigmoid()
        choice_TX = score_TX
        if "mlp.gate.e_score_correction_bias" in w and v.router_bias:
            choice_TX = score_TX + w["mlp.gate.e_score_correction_bias"].to(self.wide)
        if s.groups > 1:
            grouped = choice_TX.unflatten(-1, (s.groups, -1))
            best = (grouped.amax(-1) if s.router_score == "softmax" else grouped.topk(2).values.sum(-1)).topk(s.open_groups)
            closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best.indices, False)
            choice_TX = grouped.masked_fill(closed[..., None], -math.inf).flatten(1)
        chosen_TK = choice_TX.topk(s.experts_per_token, dim=-1).indices
        return self.routing_weights(score_TX, chosen_TK), choice_TX

    def routing_weights(self, score_TX: Tensor, chosen_TK: Tensor) -> Tensor:
        """[T, X] from scores and the chosen experts."""
        weight_TK = score_TX.gather(-1, chosen_TK)
        renormalise = self.shape.renormalise if self.variant.renormalise is None else self.variant.renormalise
        if renormalise:
            weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
        return torch.zeros_like(score_TX).scatter(-1, chosen_TK, weight_TK * self.shape.routed_scaling)

    def experts(self, x_TD: Tensor, w: LayerWeights, weights_TX: Tensor) -> Tensor:
        """[T, D]: the routed experts' sum, with a side's own routing weights."""
        out = torch.zeros(len(x_TD), self.shape.hidden, dtype=self.dtype)
        for expert in weights_TX.any(0).nonzero().flatten().tolist():
            tokens = weights_TX[:, expert].nonzero().flatten()
            source = self.variant.expert_map.get(expert, expert)
            y = self.mlp(x_TD[tokens], w, f"mlp.experts.{source}")
            out.index_add_(0, tokens, (y * weights_TX[tokens, expert, None].to(self.wide)).to(self.dtype))
        return out

    def shared(self, x_TD: Tensor, w: LayerWeights) -> Tensor:
        """[T, D]: the shared experts."""
        return self.mlp(x_TD, w, "mlp.shared_experts") * self.variant.shared_factor

    def mlp(self, x_TD: Tensor, w: LayerWeights, name: str) -> Tensor:
        """[T, D]: a gated MLP."""
        gate, up = (self._linear(x_TD, w[f"{name}.{part}_proj.weight"]) for part in ("gate", "up"))
        return self._linear(F.silu(gate) * up, w[f"{name}.down_proj.weight"])

    def log_probs(self, hidden_TD: Tensor, norm: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        """[T] of the tokens `targets` (int64 [T]), from the last layer's output."""
        logits = self._linear(self.rms_norm(hidden_TD, norm, self.shape.eps), head).to(self.wide)
        return logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)


def _turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last axis."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
