# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 with DeepSeek sparse attention (DSA) in some layers or in all, for `transformers` with `trust_remote_code=True`.

`DeepseekV2Dsa*` are for the hybrid layout (some layers), `DeepseekV32*` for the native one (all): the same code, under the
name of the architecture by which inference engines know the directory. Everything but the attention of `config.dsa_layers` is transformers' own `deepseek_v2`. Runs on transformers 5.9.0 and
5.24.0; what differs between them is met here and said where. The indexer follows the DeepSeek-V3.2 report, section 2.1;
it chooses keys and is not trained here (no gradient reaches it). Attention is eager or sdpa.

Shape letters: B batch, S queries, T keys (the cache included), H heads, J index heads, E dims of an index head,
D hidden size, L latent rank, R rotated dims.
"""

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV2ForCausalLM,
    DeepseekV2Model,
    apply_rotary_emb,
    eager_attention_forward,
)

from .configuration_deepseek_v2_dsa import DeepseekV2DsaConfig, DeepseekV32SoftmaxConfig

# Checkpoints hold one tensor per expert, the modules hold fused ones. Recent releases apply the built-in conversion to
# code outside the library only if it is registered by hand; without it every expert would be random. Releases that know
# deepseek_v32 convert it in the same way, so that their own class loses nothing.
for _model_type in ("deepseek_v2", "deepseek_v32"):
    register_checkpoint_conversion_mapping(_model_type, get_checkpoint_conversion_mapping("deepseek_v2"), overwrite=True)

INDEX_NORM_EPS = 1e-6


def softmax_scale(config) -> float:
    """qk_head_dim**-0.5 times the square of YaRN's mscale; `deepseek_v2` leaves the second factor out before 5.16."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim", 0) and rope["factor"] > 1:
        mscale = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0
        scale = scale * mscale * mscale
    return scale


def select_topk(scores: Tensor, k: int) -> Tensor:
    """The k largest scores of each row, as bool [B, S, T]; of equal scores the newest key (largest T) wins.

    So the choice depends neither on padding nor on the cache, unlike that of `torch.topk`.

    Args:
        scores: fp32 [B, S, T], -inf where a key is not allowed; such a key is never chosen.
        k: at least 1 and at most T.
    """
    kth = scores.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, tied = scores > kth, scores == kth
    places = k - above.sum(-1, keepdim=True)
    rank = tied.flip(-1).cumsum(-1).flip(-1)  # 1 is the newest tied key
    return (above | (tied & (rank <= places))) & (scores > float("-inf"))


class LightningIndexer(nn.Module):
    """score[s, t] = sum_j w[s, j] * relu(q[s, j] . k[t]), eq. (1) of the report."""

    def __init__(self, config: DeepseekV2DsaConfig, q_rank: int):
        super().__init__()
        self.n_heads, self.head_dim = config.dsa_index_n_heads, config.dsa_index_head_dim
        self.wq_b = nn.Linear(q_rank, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        # k_norm and weights_proj are computed in fp32 from parameters in the model's dtype. Parameters kept in fp32
        # would do the same sums, but FSDP refuses a module of mixed dtypes.
        self.k_norm = nn.LayerNorm(self.head_dim, eps=INDEX_NORM_EPS)
        self.weights_proj = nn.Linear(config.hidden_size, self.n_heads, bias=False)

    def key(self, x_BSD: Tensor, rotation_BSR: Tensor) -> Tensor:
        """[B, S, E] in x's dtype."""
        k = self.wk(x_BSD).float()
        k = F.layer_norm(k, (self.head_dim,), self.k_norm.weight.float(), self.k_norm.bias.float(), self.k_norm.eps)
        return _rotate_half_split(k, rotation_BSR).to(x_BSD.dtype)

    def scores(self, x_BSD: Tensor, q_latent_BSL: Tensor, key_BTE: Tensor, rotation_BSR: Tensor) -> Tensor:
        """fp32 [B, S, T], no mask applied."""
        b, s, _ = x_BSD.shape
        q = self.wq_b(q_latent_BSL).view(b, s, self.n_heads, self.head_dim)
        q = _rotate_half_split(q.float(), rotation_BSR.unsqueeze(2)).to(x_BSD.dtype)
        with torch.autocast(x_BSD.device.type, enabled=False):
            w = F.linear(x_BSD.float(), self.weights_proj.weight.float()) * (self.n_heads * self.head_dim) ** -0.5
            k = key_BTE.float().transpose(1, 2)
            total = torch.zeros(b, s, k.shape[-1], dtype=torch.float32, device=k.device)
            for j in range(self.n_heads):  # one head at a time: B*S*T numbers at once, not J times as many
                total += w[..., j : j + 1] * F.relu(q[:, :, j].float() @ k)
        return total


def _rotate_half_split(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the first R dims of x [..., E] in pairs (i, i + R/2); `rotation` is complex [..., R/2].

    The indexer's layout. MLA's own rotation pairs neighbours (2i, 2i + 1).
    """
    half = rotation.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = rotation.real, rotation.imag
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class DeepseekV2DsaAttention(DeepseekV2Attention):
    """Multi-head latent attention over the keys that the indexer chose.

    Attributes:
        index_selector: what chooses the keys, `(scores fp32 [B, S, T] with -inf where not allowed, k) -> bool
            [B, S, T]`; None is `select_topk`. It is not asked while all T keys fit into k.
        selection_observer: if set, called with the final mask, bool [B, S, T], of every forward pass.
    """

    def __init__(self, config: DeepseekV2DsaConfig, layer_idx: int):
        q_rank = config.dsa_q_rank or config.hidden_size
        own = copy.copy(config)
        own.q_lora_rank = q_rank
        super().__init__(own, layer_idx)
        self.config = config  # not the copy: set_attn_implementation() edits the model's configuration
        self.topk = config.dsa_index_topk
        self.indexer = LightningIndexer(config, q_rank)
        self.index_selector: Callable[[Tensor, int], Tensor] | None = None
        self.selection_observer: Callable[[Tensor], None] | None = None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,
        past_key_values=None,  # the cache's name before 5.2x
        cache=None,  # and since
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """As `DeepseekV2Attention.forward`. The mask may be bool, additive, or None (causal)."""
        cache = cache if cache is not None else past_key_values
        b, s, _ = hidden_states.shape
        rotation = position_embeddings.to(hidden_states.device)

        q_latent = self.q_a_layernorm(self.q_a_proj(hidden_states))
        query = self.q_b_proj(q_latent).view(b, s, -1, self.qk_head_dim).transpose(1, 2)
        q_nope, q_rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        kv = self.kv_a_proj_with_mqa(hidden_states)
        latent, k_rope = kv.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        latent = self.kv_a_layernorm(latent).unsqueeze(1)  # [B, 1, S, L]: one head, as cache layers expect
        q_rope, k_rope = apply_rotary_emb(q_rope, k_rope.unsqueeze(1), rotation)
        with torch.no_grad():
            index_key = self.indexer.key(hidden_states, rotation).unsqueeze(1)

        if cache is not None:  # the layer's "values" are the rotated key and the index key side by side
            side = torch.cat([k_rope, index_key.to(k_rope.dtype)], dim=-1)
            latent, side = cache.update(latent, side, self.layer_idx)
            k_rope, index_key = side.split([self.qk_rope_head_dim, self.indexer.head_dim], dim=-1)

        t = latent.shape[2]
        kv = self.kv_b_proj(latent.squeeze(1)).view(b, t, -1, self.qk_nope_head_dim + self.v_head_dim).transpose(1, 2)
        k_nope, value = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        key = torch.cat([k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)], dim=-1)
        query = torch.cat([q_nope, q_rope], dim=-1)

        with torch.no_grad():
            chosen = self._choose(hidden_states, q_latent, index_key.squeeze(1), rotation, attention_mask)
            # Finite, so that a row with no allowed key (left padding) becomes uniform and not NaN.
            mask = torch.zeros(b, 1, s, t, dtype=query.dtype, device=query.device)
            mask = mask.masked_fill(~chosen.unsqueeze(1), torch.finfo(query.dtype).min)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(b, s, -1).contiguous()), weights

    def _choose(self, x, q_latent, index_key_BTE, rotation, attention_mask) -> Tensor:
        """Keys each query attends to, bool [B, S, T]: allowed by the mask, and among the top k."""
        (b, s, _), t = x.shape, index_key_BTE.shape[1]
        chosen = _allowed(attention_mask, b, s, t, x.device)
        if t > self.topk:
            scores = self.indexer.scores(x, q_latent, index_key_BTE, rotation)
            scores = scores.masked_fill(~chosen, float("-inf"))
            if self.index_selector is None:
                chosen = select_topk(scores, self.topk)
            else:
                had_keys, chosen = chosen.any(-1), self.index_selector(scores, self.topk) & chosen
                if bool((had_keys & ~chosen.any(-1)).any()):
                    raise ValueError("index_selector must choose at least one allowed key for every query that has one")
        if self.selection_observer is not None:
            self.selection_observer(chosen)
        return chosen


def _allowed(mask: Tensor | None, b: int, s: int, t: int, device: torch.device) -> Tensor:
    """Causal (and padding, and document) mask in any of transformers' forms -> bool [B, S, T]."""
    if mask is None:
        # transformers' short cut for sdpa, read as it reads it. A single query sees all t keys. Several queries are the
        # FIRST s positions: t > s then means a static cache, whose remaining slots are still empty.
        query = torch.arange(t - 1, t, device=device) if s == 1 else torch.arange(s, device=device)
        return (torch.arange(t, device=device) <= query[:, None]).expand(b, -1, -1)
    mask = mask[:, 0, :, :t]
    return (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2).expand(b, -1, -1)


class _DsaMixin:
    """What the model classes state."""

    config_class = DeepseekV2DsaConfig
    _supports_flash_attn = False
    _supports_flex_attn = False
    _keep_in_fp32_modules_strict = None  # see DeepseekV2DsaModel

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As in transformers, which makes every parameter it loads trainable: indexers are frozen again."""
        loaded = super().from_pretrained(*args, **kwargs)
        freeze_indexers(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded


def freeze_indexers(model: nn.Module) -> None:
    """No gradient, and no weight decay of an optimizer over what has one, may move `config.dsa_frozen_indexers`."""
    for i in model.config.dsa_frozen_indexers:
        model.base_model.layers[i].self_attn.indexer.requires_grad_(False)


class DeepseekV2DsaModel(_DsaMixin, DeepseekV2Model):
    """`DeepseekV2Model` whose `config.dsa_layers` have DSA attention, with YaRN's softmax scale in every layer."""

    config: DeepseekV2DsaConfig

    def __init__(self, config: DeepseekV2DsaConfig | DeepseekV32SoftmaxConfig):
        super().__init__(config)
        for i, layer in enumerate(self.layers):
            if i in config.dsa_layers:
                layer.self_attn = DeepseekV2DsaAttention(config, i)
            layer.self_attn.scaling = softmax_scale(config)
        # Recent releases hold the routers' weights in fp32 in a bf16 model. Routing is computed in fp32 either way, and
        # FSDP wants one dtype.
        self.layers.to(torch.get_default_dtype())
        self.post_init()
        freeze_indexers(self)


class DeepseekV2DsaForCausalLM(_DsaMixin, DeepseekV2ForCausalLM):
    """`DeepseekV2ForCausalLM` over `DeepseekV2DsaModel`."""

    config: DeepseekV2DsaConfig
    _inner_class = DeepseekV2DsaModel

    def __init__(self, config: DeepseekV2DsaConfig | DeepseekV32SoftmaxConfig):
        # The parent's own __init__ is passed over: it would build, and throw away, a whole stock model.
        super(DeepseekV2ForCausalLM, self).__init__(config)
        self.model = self._inner_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class DeepseekV32Model(DeepseekV2DsaModel):
    """`DeepseekV2DsaModel` whose layers are all DSA, from a configuration with DeepSeek-V3.2's keys."""

    config: DeepseekV32SoftmaxConfig
    config_class = DeepseekV32SoftmaxConfig


class DeepseekV32ForCausalLM(DeepseekV2DsaForCausalLM):
    """`DeepseekV2DsaForCausalLM` over `DeepseekV32Model`. The name is the one that engines look for in config.json."""

    config: DeepseekV32SoftmaxConfig
    config_class = DeepseekV32SoftmaxConfig
    _inner_class = DeepseekV32Model


__all__ = ["DeepseekV2DsaForCausalLM", "DeepseekV2DsaModel", "DeepseekV32ForCausalLM", "DeepseekV32Model"]
