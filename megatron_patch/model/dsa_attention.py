"""Sparse MLA as a megatron-core self-attention: MLA's projections, our indexer, our op.

megatron-core 0.16.1 has a DSA of its own; it is wired for all layers or none, wants bf16 and a CUDA-only package,
rotates the wrong dimensions for released weights, and its KL gradient grows with the number of micro-batches.
"""

from dataclasses import asdict

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megatron_patch.errors import UserError
from megatron_patch.model.architecture import Architecture, DsaSettings
from megatron_patch.model.dsa_state import SPARSE, AttachLoss, DsaState
from megatron_patch.model.indexer import IndexInputs, LightningIndexer
from megatron_patch.ops.backends import DsaBackend
from megatron_patch.ops.checks import DsaSizes
from megatron_patch.ops.reference import DsaOutput
from megatron_patch.ops.rope import rope_cos_sin

# Shapes: T tokens of the pack, H heads, N dims of a key without RoPE, P RoPE dims, V dims of a value, R of the latent.


def positions_in_documents(cu_seqlens: Tensor) -> Tensor:
    """Position of each token in its own document: int64 [T], 0 at every document's start."""
    lengths = cu_seqlens.diff().long()
    starts = torch.repeat_interleave(cu_seqlens[:-1].long(), lengths)
    return torch.arange(starts.numel(), device=cu_seqlens.device) - starts


def backend_sizes(arch: Architecture, dsa: DsaSettings, dtype: torch.dtype) -> DsaSizes:
    """What a backend has to take of a model whose heads are all on this rank."""
    sizes = arch.num_heads, arch.kv_lora_rank, arch.qk_rope_head_dim
    return DsaSizes(*sizes, dsa.index_n_heads, dsa.index_head_dim, dsa.index_topk, dtype)


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

    Raises:
        UserError: the backend cannot take a model of these sizes.
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
        if backend.check is not None:
            try:
                backend.check(backend_sizes(architecture, dsa, config.params_dtype))
            except ValueError as error:
                raise UserError(f"--dsa-backend {backend.name}: {error}; --dsa-backend chunked takes every size") from None
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
        # query, key [T, H, N + P], value [T, H, V], q_latent, latent [T, R]: after their norms, in the local spec
        query, key, value, q_latent, latent = self.get_query_key_value_tensors(
            hidden_states, packed_seq_params=packed_seq_params
        )
        cos, sin = rope_cos_sin(
            positions_in_documents(cu_seqlens), self.architecture.qk_rope_head_dim, **asdict(self.architecture.rope)
        )
        index = self.indexer(hidden_states.squeeze(1), q_latent, cos, sin)
        counted, record = self.state.counted, self.state.recorded
        options = {
            "topk": self.dsa.index_topk,
            "softmax_scale": self.softmax_scale,
            "counted": counted,
            "indices": record.indices if self.state.replays else None,
        }
        if self.backend.absorbed is not None and self.state.stage == SPARSE:
            result = self._absorbed(query, key, latent, index, cu_seqlens, options)
        else:
            options |= {"stage": self.state.stage, "recall": self.state.recall and not self.state.replays}
            result = self.backend.attention(query, key, value, *index, cu_seqlens, **options)
        if record is not None:
            record.indices = result.indices
        tokens = query.size(0) if counted is None else int(counted.sum())
        self.state.report(self.layer_number - 1, result.indexer_kl, result.index_recall, tokens)
        output = result.out.flatten(1)
        if torch.is_grad_enabled():
            output = AttachLoss.apply(output, result.indexer_kl, self.state.kl_grad_scale)
        return self.linear_proj(output.unsqueeze(1))

    def _absorbed(
        self, query: Tensor, key: Tensor, latent: Tensor, index: IndexInputs, cu_seqlens: Tensor, options: dict
    ) -> DsaOutput:
        """The op over MLA's latent: its up-projection goes into the query and the output, so that heads share one key.

        DeepSeek-V2 report (arXiv 2405.04434), section 2.1.2. `key` gives its RoPE part only, which all heads have alike.
        """
        heads, nope = query.size(1), self.config.qk_head_dim
        up_HXR = self.linear_kv_up_proj.weight.unflatten(0, (heads, -1))
        key_up_HNR, value_up_HVR = up_HXR.split([nope, self.config.v_head_dim], dim=1)
        query_THR = torch.einsum("thn,hnr->thr", query[..., :nope], key_up_HNR)
        key_rope_TP = key[:, 0, nope:]
        result = self.backend.absorbed(query_THR, query[..., nope:], latent, key_rope_TP, *index, cu_seqlens, **options)
        return result._replace(out=torch.einsum("thr,hvr->thv", result.out, value_up_HVR))
