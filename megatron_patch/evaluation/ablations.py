"""What a model's DSA layers contribute: forward passes with them bypassed, or with their selected keys scrambled.

No ablation touches the layers below the first DSA layer, so they are computed once: for all passes over one batch
(`fan_out`), or for all batches of a first run that later runs repeat (`recorded_trunk`, `replayed_trunk`). In a model
with two DSA layers on 27 frozen ones that makes the ablations almost free.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_patch.hf_model.modeling_deepseek_v2_dsa import select_topk
from megatron_patch.model.architecture import BASE_LAYERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WITH, BYPASSED, SCRAMBLED = "model", "bypassed", "scrambled"
Ablation = Callable[[], AbstractContextManager[None]]


def dsa_layers(model: "PreTrainedModel") -> tuple[int, ...]:
    """Numbers of the DSA layers that upcycling added, ascending; none for a stock model.

    In the native layout the base's layers are DSA as well. They are not ablated: without them there is no model.
    """
    layers, of_base = getattr(model.config, "dsa_layers", None) or (), getattr(model.config, BASE_LAYERS, 0)
    return tuple(sorted(i for i in layers if i >= of_base))


def layer_name(layer: int) -> str:
    """Name of the ablation that bypasses this layer alone."""
    return f"{BYPASSED} {layer}"


@contextmanager
def bypassed(model: "PreTrainedModel", layers: Iterable[int] | None = None) -> Iterator[None]:
    """Within the block, whole decoder layers (attention and MLP) pass their input on.

    Args:
        layers: their numbers; None: all DSA layers, which leaves the base.
    """
    chosen = dsa_layers(model) if layers is None else layers
    with _replaced({model.base_model.layers[i]: _identity for i in chosen}):
        yield


@contextmanager
def scrambled(model: "PreTrainedModel", generator: torch.Generator) -> Iterator[None]:
    """Within the block, each query of a DSA layer attends to random allowed keys, as many as it would have selected.

    A query with no more than top-k allowed keys selects all of them, so nothing changes for it.

    Args:
        generator: a CPU generator; the draws depend on it and on the shapes of the batches.
    """

    def random_keys(scores: Tensor, k: int) -> Tensor:
        noise = torch.rand(scores.shape, generator=generator).to(scores.device)
        return select_topk(noise.masked_fill(scores == float("-inf"), float("-inf")), k)

    attentions = [model.base_model.layers[i].self_attn for i in dsa_layers(model)]
    before = [attention.index_selector for attention in attentions]
    try:
        for attention in attentions:
            attention.index_selector = random_keys
        yield
    finally:
        for attention, selector in zip(attentions, before, strict=True):
            attention.index_selector = selector


def fan_out(
    model: "PreTrainedModel", ids: Tensor, attention_mask: Tensor, ablations: Mapping[str, Ablation]
) -> dict[str, Tensor]:
    """Final hidden states of one batch, as the model is and under each ablation.

    Args:
        ids, attention_mask: int64 [B, S], padded on the right.
        ablations: each may change DSA layers only.

    Returns:
        `WITH` and each ablation's name -> [B, S, D], after the final norm.
    """
    trunk: list[Tensor] = []
    below = _below(model)
    hook = below[-1].register_forward_hook(lambda _m, _i, output: trunk.append(output)) if below else None
    try:
        hidden = {WITH: _hidden(model, ids, attention_mask)}
    finally:
        if hook is not None:
            hook.remove()
    known = {layer: _identity for layer in below[:-1]} | {layer: lambda *_, **__: trunk[0] for layer in below[-1:]}
    for name, ablation in ablations.items():
        with _replaced(known), ablation():
            hidden[name] = _hidden(model, ids, attention_mask)
    return hidden


@contextmanager
def recorded_trunk(model: "PreTrainedModel") -> Iterator[list[Tensor]]:
    """Within the block, keep what comes out below the first DSA layer, of each forward pass: [B, S, D], on the CPU.

    2 GB for half a million tokens of a model of hidden size 2048 in bf16.
    """
    trunk: list[Tensor] = []
    below = _below(model)
    hook = below[-1].register_forward_hook(lambda _m, _i, output: trunk.append(output.cpu())) if below else None
    try:
        yield trunk
    finally:
        if hook is not None:
            hook.remove()


@contextmanager
def replayed_trunk(model: "PreTrainedModel", trunk: list[Tensor]) -> Iterator[None]:
    """Within the block, the layers below the first DSA layer give what they gave: the same batches must come again."""
    below, passes = _below(model), iter(trunk)

    def again(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        known = next(passes)
        assert known.shape == hidden_states.shape, "another batch than the one recorded"
        return known.to(hidden_states.device)

    with _replaced({layer: _identity for layer in below[:-1]} | {layer: again for layer in below[-1:]}):
        yield
    assert next(passes, None) is None or not below, "fewer batches than were recorded"


def _below(model: "PreTrainedModel") -> list[nn.Module]:
    """The layers below the first DSA layer; none for a stock model."""
    return [model.base_model.layers[i] for i in range(min(dsa_layers(model), default=0))]


def _hidden(model: "PreTrainedModel", ids: Tensor, attention_mask: Tensor) -> Tensor:
    return model.base_model(input_ids=ids, attention_mask=attention_mask, use_cache=False).last_hidden_state


def _identity(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return hidden_states


@contextmanager
def _replaced(forwards: Mapping[nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Give modules another `forward` within the block; what an enclosing block gave them comes back afterwards."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward
