"""A frozen base layer with a lightning indexer beside it: the layer computes what it did, the indexer learns from it.

Attention stays dense and the base's own. The indexer sees what it will see in the native layout, where the layer has a
query latent: q_a_proj = diag(1/w), a norm, and w on top (w = input_layernorm.weight). That latent is computed here and
held nowhere; it changes no query of this model.
"""

from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.nn.functional as F
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_patch.model.architecture import Architecture, DsaSettings
from megatron_patch.model.dsa_attention import positions_in_documents
from megatron_patch.model.dsa_state import DENSE, DsaState
from megatron_patch.model.indexer import LightningIndexer
from megatron_patch.ops.backends import DsaBackend
from megatron_patch.ops.rope import rope_cos_sin

# Shapes: T tokens of the pack, D hidden, H heads.


def query_latent(x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """`q_a_layernorm(q_a_proj(x))` of the native layout, rounded as there: [T, D] in x's dtype.

    Args:
        x: [T, D], after the input norm.
        norm_weight: [D], w, without zeros.
        eps: of the norms.
    """
    divided = x * (1 / norm_weight.float()).to(x.dtype)  # the product with a diagonal matrix
    return norm_weight * F.rms_norm(divided.float(), (x.size(-1),), eps=eps).to(x.dtype)


class IndexedSelfAttention(MLASelfAttention):
    """The base's attention, whose output is not touched, and an indexer that learns from its probabilities.

    Args:
        config, submodules, layer_number: as MLASelfAttention, with a plain query projection.
        architecture: the base's, for RoPE and eps.
        dsa: sizes of the indexer.
        state: shared with the training step, which adds the losses that are left there.
        backend: computes the dense KL and the selection.

    Attributes:
        norm_weight: () -> w, set by the layer, which owns it.
    """

    norm_weight: Callable[[], Tensor]

    def __init__(
        self,
        config,
        submodules,
        layer_number: int,
        attn_mask_type=None,
        cp_comm_type: str | None = None,
        pg_collection=None,
        *,
        architecture: Architecture,
        dsa: DsaSettings,
        state: DsaState,
        backend: DsaBackend,
    ):
        super().__init__(config, submodules, layer_number, attn_mask_type, cp_comm_type, pg_collection)
        self.indexer = LightningIndexer(config.hidden_size, config.hidden_size, dsa, config.params_dtype)
        self.architecture, self.dsa, self.state, self.backend = architecture, dsa, state, backend
        self._seen: tuple[Tensor, Tensor, Tensor] | None = None

    def get_query_key_value_tensors(self, *args, **kwargs):
        """As MLASelfAttention's; query, key and value are kept for the indexer's target."""
        result = super().get_query_key_value_tensors(*args, **kwargs)
        self._seen = result[:3]
        return result

    def forward(self, hidden_states: Tensor, attention_mask, *, packed_seq_params=None, **kwargs):
        """hidden_states [T, 1, D] (a pack) -> what MLASelfAttention gives: ([T, 1, D], no bias)."""
        output = super().forward(hidden_states, attention_mask, packed_seq_params=packed_seq_params, **kwargs)
        query, key, value = self._seen
        self._seen = None
        self._learn(hidden_states.squeeze(1).detach(), query, key, value, packed_seq_params.cu_seqlens_q)
        return output

    def _learn(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> None:
        """Leave the dense KL of this layer with the state, and show its parts to an observer."""
        cos, sin = rope_cos_sin(
            positions_in_documents(cu_seqlens), self.architecture.qk_rope_head_dim, **asdict(self.architecture.rope)
        )
        index = self.indexer(x, query_latent(x, self.norm_weight(), self.architecture.norm_eps), cos, sin)
        query, key, value = query.detach(), key.detach(), value.detach()
        if self.state.observer is not None:
            self.state.observer(self.layer_number - 1, query, key, index, cu_seqlens, self.softmax_scale)
        counted = self.state.counted
        result = self.backend.attention(
            query,
            key,
            value[..., :1],  # the op's output is not used; its probabilities are
            index.query,
            index.key,
            index.weights,
            cu_seqlens,
            topk=self.dsa.index_topk,
            softmax_scale=self.softmax_scale,
            stage=DENSE,
            counted=counted,
            recall=self.state.recall,
        )
        tokens = query.size(0) if counted is None else int(counted.sum())
        self.state.report(self.layer_number - 1, result.indexer_kl, result.index_recall, tokens)
        if torch.is_grad_enabled():
            self.state.kept.append(result.indexer_kl)


class IndexedTransformerLayer(TransformerLayer):
    """A base layer whose attention is an `IndexedSelfAttention`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # A function, not the parameter: held by two modules, it would be in the state dictionary twice.
        self.self_attention.norm_weight = lambda: self.input_layernorm.weight
