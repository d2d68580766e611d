"""The frozen trunk: embedding and base layers, all that stands below the first DSA layer."""

from itertools import islice

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_patch.model.dsa_state import DsaState


class TrunkTransformerLayer(TransformerLayer):
    """A base layer with a switch to skip it, for when the trunk's output is given.

    Args:
        state: says whether the layer is bypassed.
    """

    def __init__(self, config, submodules, *args, state: DsaState, **kwargs):
        super().__init__(config, submodules, *args, **kwargs)
        self.state = state

    def forward(self, hidden_states: Tensor, *args, **kwargs):
        """[T, 1, D] -> ([T, 1, D], context), as TransformerLayer; the input itself where the layer is bypassed."""
        if self.layer_number - 1 in self.state.bypassed:
            return hidden_states, kwargs.get("context")
        return super().forward(hidden_states, *args, **kwargs)


@torch.no_grad()
def trunk_output(model: GPTModel, tokens: Tensor, packed_seq_params, layers: int) -> Tensor:
    """What enters the first DSA layer, [T, 1, D] in the model's dtype.

    Args:
        model: bare.
        tokens: int64 [T]; documents laid end to end.
        packed_seq_params: their boundaries (`builder.packed_seq_params`).
        layers: of the trunk.
    """
    hidden = model.embedding(input_ids=tokens[None], position_ids=None)
    for layer in islice(model.decoder.layers, layers):
        hidden, _ = layer(hidden_states=hidden, attention_mask=None, packed_seq_params=packed_seq_params)
    return hidden
