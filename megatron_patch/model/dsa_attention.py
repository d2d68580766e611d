"""Sparse MLA as a megatron-core self-attention: MLA's projections, our indexer, our op.

megatron-core 0.16.1 has a DSA of its own; it is wired for all layers or none, wants bf16 and a CUDA-only package,
rotates the wrong dimensions for released weights, and its KL gradient grows with the number of micro-batches.
"""

from dataclasses import asdict

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megatron_patch.model.architecture import Architecture, DsaSettings
from megatron_patch.model.dsa_state import AttachLoss, DsaState
from megatron_patch.model.indexer import LightningIndexer
from megatron_patch.ops.backends import DsaBackend
from megatron_patch.ops.rope import rope_cos_sin


def positions_in_documents(cu_seqlens: Tensor) -> Tensor:
    """Position of each token in its own document: int64 [T], 0 at every document's start."""
    lengths = cu_seqlens.diff().long()
    starts = torch.repeat_interleave(cu_seqlens[:-1].long(), lengths)
    return torch.arange(starts.numel(), device=cu_seqlens.device) - starts


class DsaSelfAttention(MLASelfAttention):
    """MLA whose every query attends to the `index_topk` keys that its lightning indexer scores highest.

    Args:
        config: of this layer: `q_lora_rank` is the hidden size.
        submodules: MLA's; `core_attention` is the identity, since the op is called directly.
        layer_number: 1-based, as megatron-core counts.
        architecture: the base's, for RoPE and the softmax scale.
        dsa: sizes of the indexer.
        state: shared with the training step.
        backend: computes the op.
    """

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
        if submodules.core_attention is not IdentityOp:
            raise ValueError("DsaSelfAttention calls its op itself: core_attention must be IdentityOp")
        super().__init__(config, submodules, layer_number, attn_mask_type, cp_comm_type, pg_collection)
        self.indexer = LightningIndexer(config.hidden_size, config.q_lora_rank, dsa, config.params_dtype)
        self.architecture, self.dsa, self.state, self.backend = architecture, dsa, state, backend

    def forward(
        self, hidden_states: Tensor, attention_mask, *, packed_seq_params=None, **unused
    ) -> tuple[Tensor, None]:
        """hidden_states [T, 1, D] (a pack) -> ([T, 1, D], no bias).

        Raises:
            ValueError: no `packed_seq_params`, or an option of megatron-core's attention that DSA does not have.
        """
        asked = [name for name, value in unused.items() if value is not None]
        if packed_seq_params is None or asked:
            raise ValueError(f"DsaSelfAttention needs packed_seq_params and takes no {asked}")
        cu_seqlens = packed_seq_params.cu_seqlens_q
        # query, key [T, H, Q], value [T, H, V], q_latent [T, R]: after its norm, in the local spec
        query, key, value, q_latent, _ = self.get_query_key_value_tensors(
            hidden_states, packed_seq_params=packed_seq_params
        )
        cos, sin = rope_cos_sin(
            positions_in_documents(cu_seqlens), self.architecture.qk_rope_head_dim, **asdict(self.architecture.rope)
        )
        index = self.indexer(hidden_states.squeeze(1), q_latent, cos, sin)
        counted, record = self.state.counted, self.state.recorded
        result = self.backend.attention(
            query,
            key,
            value,
            index.query,
            index.key,
            index.weights,
            cu_seqlens,
            topk=self.dsa.index_topk,
            softmax_scale=self.softmax_scale,
            stage=self.state.stage,
            counted=counted,
            indices=record.indices if self.state.replays else None,
            recall=self.state.recall and not self.state.replays,
        )
        if record is not None:
            record.indices = result.indices
        tokens = query.size(0) if counted is None else int(counted.sum())
        self.state.report(self.layer_number - 1, result.indexer_kl, result.index_recall, tokens)
        output = result.out.flatten(1)
        if torch.is_grad_enabled():
            output = AttachLoss.apply(output, result.indexer_kl, self.state.kl_grad_scale)
        return self.linear_proj(output.unsqueeze(1))
