"""A trainable DSA transformer layer: the base's layer with its own settings and a switch to skip it."""

import copy

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_patch.model.dsa_state import DsaState


class DsaTransformerLayer(TransformerLayer):
    """A transformer layer whose config differs from the block's in two values that megatron-core has only globally.

    Args:
        q_rank: rank of the query latent; the base has none.
        aux_loss_coeff: of the load-balancing loss, which acts on the new layers' routers only.
        state: says whether the layer is bypassed.
    """

    def __init__(self, config, submodules, *args, q_rank: int, aux_loss_coeff: float, state: DsaState, **kwargs):
        config = copy.copy(config)
        config.q_lora_rank, config.moe_aux_loss_coeff = q_rank, aux_loss_coeff
        super().__init__(config, submodules, *args, **kwargs)
        self.state = state

    def forward(self, hidden_states: Tensor, *args, **kwargs):
        """[T, 1, D] -> ([T, 1, D], context), as TransformerLayer; the input itself where the layer is bypassed."""
        if self.layer_number - 1 in self.state.bypassed:
            return hidden_states, kwargs.get("context")
        return super().forward(hidden_states, *args, **kwargs)
