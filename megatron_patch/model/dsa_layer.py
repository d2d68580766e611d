"""A trainable DSA transformer layer: the base's layer with its own settings and a switch to skip it."""

import copy

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_patch.model.dsa_state import DsaState, Recorded


class DsaTransformerLayer(TransformerLayer):
    """A transformer layer whose config differs from the block's in two values that megatron-core has only globally.

    Args:
        q_rank: rank of the query latent; the base has none.
        aux_loss_coeff: of the load-balancing loss, which acts on the new layers' routers only.
        recompute: keep the layer's input only, and run the layer again in the backward pass.
        state: says whether the layer is bypassed.
    """

    def __init__(
        self, config, submodules, *args, q_rank: int, aux_loss_coeff: float, recompute: bool, state: DsaState, **kwargs
    ):
        config = copy.copy(config)
        config.q_lora_rank, config.moe_aux_loss_coeff = q_rank, aux_loss_coeff
        super().__init__(config, submodules, *args, **kwargs)
        self.recompute, self.state = recompute, state

    def forward(self, hidden_states: Tensor, *args, **kwargs):
        """[T, 1, D] -> ([T, 1, D], context), as TransformerLayer; the input itself where the layer is bypassed."""
        if self.layer_number - 1 in self.state.bypassed:
            return hidden_states, kwargs.get("context")
        if not (self.recompute and torch.is_grad_enabled()):
            return super().forward(hidden_states, *args, **kwargs)
        record = Recorded(self.state.stage, self.state.kl_grad_scale, self.state.counted)

        def contexts():
            return self.state.recording(record, again=False), self.state.recording(record, again=True)

        # Nothing random is in the layer, so that no generator's state has to be kept.
        return checkpoint(
            super().forward, hidden_states, *args, use_reentrant=False, context_fn=contexts, preserve_rng_state=False, **kwargs
        )
