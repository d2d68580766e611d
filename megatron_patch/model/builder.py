"""Build the mixed model from an architecture and a layer pattern, by spec.

Import only after `devices.activate`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from megatron_patch.devices import mcore_fixes
from megatron_patch.model.architecture import Architecture, DsaSettings
from megatron_patch.model.core_attention import SdpaCoreAttention
from megatron_patch.model.dsa_attention import DsaSelfAttention
from megatron_patch.model.dsa_layer import DsaTransformerLayer
from megatron_patch.model.dsa_state import DsaState
from megatron_patch.model.head_loss import UpcycledModel
from megatron_patch.model.indexed_attention import IndexedSelfAttention, IndexedTransformerLayer
from megatron_patch.model.layer_pattern import DSA, check_pattern
from megatron_patch.model.layers import DuplicatedLinear, RMSNorm
from megatron_patch.model.trunk import TrunkTransformerLayer
from megatron_patch.ops.backends import DsaBackend


@dataclass(frozen=True)
class BuildSettings:
    """What, beside the architecture, decides the model's numerics and its place on the ranks.

    base_indexers: the base's layers have indexers beside them, which change nothing of what they compute.
    """

    dtype: torch.dtype = torch.float32
    aux_loss_coeff: float = 0.0
    expert_parallel: int = 1
    recompute_dsa: bool = False
    base_indexers: bool = False


def megatron_config(
    arch: Architecture, pattern: tuple[str, ...], build: BuildSettings, **overrides
) -> MLATransformerConfig:
    """The block's config: the base layers' values. Everything that megatron-core would default is written out.

    Parity with transformers was checked value by value (tests/model/test_base_parity.py): the defaults of
    `mscale_all_dim`, `layernorm_epsilon`, `qk_layernorm` and `moe_router_pre_softmax` are silently wrong here.
    """
    rope = arch.rope
    values = dict(
        num_layers=len(pattern),
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        ffn_hidden_size=arch.ffn_size,
        # multi-head latent attention
        q_lora_rank=None,
        kv_lora_rank=arch.kv_lora_rank,
        qk_head_dim=arch.qk_nope_head_dim,
        qk_pos_emb_head_dim=arch.qk_rope_head_dim,
        v_head_dim=arch.v_head_dim,
        kv_channels=arch.v_head_dim,
        qk_layernorm=True,
        rope_type="yarn" if rope.kind == "yarn" else "rope",
        rotary_base=rope.theta,
        rotary_scaling_factor=rope.factor,
        original_max_position_embeddings=rope.original_max_positions,
        beta_fast=rope.beta_fast,
        beta_slow=rope.beta_slow,
        mscale=rope.mscale,
        mscale_all_dim=rope.mscale_all_dim,
        rotary_interleaved=False,
        # norms and MLPs
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # mixture of experts; the load-balancing loss is switched on per DSA layer
        num_moe_experts=arch.num_experts,
        moe_router_topk=arch.experts_per_token,
        moe_ffn_hidden_size=arch.moe_ffn_size,
        moe_shared_expert_intermediate_size=arch.moe_ffn_size * arch.num_shared_experts,
        moe_layer_freq=[int(arch.is_moe(i)) for i in range(len(pattern))],
        moe_router_score_function="softmax",
        moe_router_pre_softmax=True,
        moe_router_topk_scaling_factor=arch.routed_scaling,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,
        expert_model_parallel_size=build.expert_parallel,
        # the base is read and the new layers are initialised: nothing may be drawn at construction
        perform_initialization=False,
        use_cpu_initialization=True,
        init_method_std=arch.init_std,
        params_dtype=build.dtype,
        pipeline_dtype=build.dtype,
        bf16=build.dtype == torch.bfloat16,
        # fusions need a GPU, and those of gradients would write into frozen weights
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    return MLATransformerConfig(**(values | overrides))


def build_model(
    arch: Architecture,
    pattern: tuple[str, ...],
    dsa: DsaSettings,
    build: BuildSettings,
    backend: DsaBackend,
    **config_overrides,
) -> tuple[GPTModel, DsaState]:
    """The model with uninitialised parameters (fill it with `load_base` and `initialize`), and its DSA state.

    Args:
        arch: the base.
        pattern: the base's layers, then the DSA layers.
        dsa: sizes of the indexer.
        build: numerics and parallel layout.
        backend: computes the DSA op.
        config_overrides: values of the megatron-core config, for tests that plant a wrong one.

    Raises:
        UserError: the pattern does not fit the base.
    """
    check_pattern(pattern, arch.num_layers)
    mcore_fixes.register_duplicated_linear(DuplicatedLinear)
    config = megatron_config(arch, pattern, build, **config_overrides)
    state = DsaState()
    specs = [_layer_spec(arch, i, kind, dsa, build, state, backend) for i, kind in enumerate(pattern)]
    model = UpcycledModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm),
        vocab_size=arch.vocab_size,
        max_sequence_length=arch.max_positions,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=arch.rope.theta,
        parallel_output=True,
    )
    return model, state


def _layer_spec(
    arch: Architecture,
    index: int,
    kind: str,
    dsa: DsaSettings,
    build: BuildSettings,
    state: DsaState,
    backend: DsaBackend,
) -> ModuleSpec:
    is_dsa, indexed = kind == DSA, kind != DSA and build.base_indexers
    attention = ModuleSpec(
        module=DsaSelfAttention if is_dsa else IndexedSelfAttention if indexed else MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=DuplicatedLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=DuplicatedLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=IdentityOp if is_dsa else SdpaCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            kv_layernorm=RMSNorm,
        ),
    )
    layer = ModuleSpec(
        module=DsaTransformerLayer if is_dsa else IndexedTransformerLayer if indexed else TrunkTransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_moe_spec(arch) if arch.is_moe(index) else _dense_spec(),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    if is_dsa or indexed:
        attention.params |= {"architecture": arch, "dsa": dsa, "state": state, "backend": backend}
    if is_dsa:
        layer.params = {"q_rank": arch.hidden_size, "aux_loss_coeff": build.aux_loss_coeff, "state": state}
        layer.params["recompute"] = build.recompute_dsa
    elif not indexed:
        layer.params = {"state": state}
    return layer


def _dense_spec() -> ModuleSpec:
    return ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )


def _moe_spec(arch: Architecture) -> ModuleSpec:
    return get_moe_module_spec(use_te=False, num_experts=arch.num_experts, moe_grouped_gemm=False)


def packed_seq_params(cu_seqlens: Tensor) -> PackedSeqParams:
    """Document boundaries (int [n + 1], first 0, last T) in the form that megatron-core passes down to attention."""
    longest = int(cu_seqlens.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def forward_pack(
    model: torch.nn.Module, tokens: Tensor, cu_seqlens: Tensor, labels: Tensor | None = None, below: Tensor | None = None
) -> Tensor:
    """Run a pack of documents through the model.

    Args:
        model: from `build_model`, or its DDP wrapper.
        tokens: int64 [T]; documents laid end to end.
        cu_seqlens: int32 [n + 1].
        labels: int64 [T], or None.
        below: [T, 1, D], what takes the place of the tokens' embeddings; the caller bypasses the layers that it comes from.

    Returns:
        Logits [T, vocabulary] in the model's dtype, or with labels the loss of each token, fp32 [T] (nats).
    """
    out = model(
        input_ids=tokens[None],
        position_ids=None,  # RoPE is applied inside MLA from the document boundaries
        attention_mask=None,
        decoder_input=below,
        labels=None if labels is None else labels[None],
        packed_seq_params=packed_seq_params(cu_seqlens),
    )
    return out.squeeze(0)
