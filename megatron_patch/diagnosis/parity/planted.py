"""Plant a known fault in a loaded model, for drills and for measuring what a fault does. Everything is undone afterwards.

The models are an export's (`hf_model`), whatever the layout, or transformers' own `deepseek_v2` and `deepseek_v32` as
far as a fault concerns them. Two faults are not of a model in evaluation mode: `stale_topk_recompute` is one of training,
and `attention_leaks_documents` of how documents are laid out.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_patch.diagnosis.parity.records import shadow
from megatron_patch.faults import Fault

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARED_FACTOR = 1.01
SWAPPED = (0, 1)


class Undo(contextlib.ExitStack):
    """Undoes what was planted, and counts the places."""

    places = 0

    def callback(self, *args, **kwargs):
        self.places += 1
        return super().callback(*args, **kwargs)


Plant = Callable[["PreTrainedModel", Undo], None]


@contextlib.contextmanager
def planted(model: "PreTrainedModel", fault: Fault) -> Iterator[None]:
    """While the block runs the model has the fault, in every layer that can have it (`experts_swapped`: in the last).

    Raises:
        KeyError: a fault that is not one of a model.
        ValueError: the model has no part that can have it.
    """
    with Undo() as stack:
        PLANTS[fault](model, stack)
        if not stack.places:
            raise ValueError(f"no part of {type(model).__name__} can have {fault.value}")
        yield


def _indexers(model: "PreTrainedModel") -> Iterator[nn.Module]:
    return (layer.self_attn for layer in model.base_model.layers if hasattr(layer.self_attn, "indexer"))


def _moes(model: "PreTrainedModel") -> Iterator[nn.Module]:
    return (layer.mlp for layer in model.base_model.layers if hasattr(layer.mlp, "gate"))


def _index_rope(kind: str) -> Plant:
    def rotate(x: Tensor, rotation: Tensor) -> Tensor:
        half = rotation.shape[-1]
        cos, sin = rotation.real, rotation.imag
        if kind == "interleaved":
            turned, rest = x[..., : 2 * half], x[..., 2 * half :]
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
            return torch.cat([turned, rest], dim=-1)
        rest, a, b = x.split([x.size(-1) - 2 * half, half, half], dim=-1)
        return torch.cat([rest, a * cos - b * sin, b * cos + a * sin], dim=-1)

    def plant(model: "PreTrainedModel", stack: Undo) -> None:
        module = sys.modules[type(model).__module__]
        if hasattr(module, "_rotate_half_split"):
            shadow(stack, module, "_rotate_half_split", rotate)

    return plant


def _unnormed_latent(model: "PreTrainedModel", stack: Undo) -> None:
    for attention in _indexers(model):
        scores = attention.indexer.scores

        def other(x, latent, *args, attention=attention, scores=scores):
            return scores(x, attention.q_a_proj(x), *args)

        shadow(stack, attention.indexer, "scores", other)


def _k_norm_eps(model: "PreTrainedModel", stack: Undo) -> None:
    for attention in _indexers(model):
        shadow(stack, attention.indexer.k_norm, "eps", 1e-5)


def _k_norm_no_bias(model: "PreTrainedModel", stack: Undo) -> None:
    for attention in _indexers(model):
        _overwrite(stack, attention.indexer.k_norm.bias, torch.zeros_like(attention.indexer.k_norm.bias))


def _overwrite(stack: Undo, parameter: Tensor, value: Tensor) -> None:
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter.copy_(value)
    stack.callback(lambda: parameter.data.copy_(before))


def _mscale(model: "PreTrainedModel", stack: Undo) -> None:
    for layer in model.base_model.layers:
        attention = layer.self_attn
        plain = attention.qk_head_dim**-0.5
        if attention.scaling != plain:
            shadow(stack, attention, "scaling", plain)


def _swap_experts(model: "PreTrainedModel", stack: Undo) -> None:
    experts = list(_moes(model))[-1].experts
    a, b = SWAPPED
    for parameter in (experts.gate_up_proj, experts.down_proj):
        value = parameter.detach().clone()
        value[[a, b]] = value[[b, a]]
        _overwrite(stack, parameter, value)


def _router_bias(model: "PreTrainedModel", stack: Undo) -> None:
    for moe in _moes(model):
        if hasattr(moe.gate, "e_score_correction_bias"):
            _overwrite(stack, moe.gate.e_score_correction_bias, torch.zeros_like(moe.gate.e_score_correction_bias))


def _positions(model: "PreTrainedModel", stack: Undo) -> None:
    """Queries one position ahead of their keys: a turn of one more step."""
    turn = torch.polar(torch.ones_like(model.base_model.rotary_emb.inv_freq), model.base_model.rotary_emb.inv_freq.float())
    names = {type(model).__module__, *(type(layer.self_attn).__module__ for layer in model.base_model.layers)}
    for module in (sys.modules[name] for name in sorted(names)):
        rotate = getattr(module, "apply_rotary_emb", None)
        if rotate is not None:
            shadow(stack, module, "apply_rotary_emb", lambda q, k, f, r=rotate: (r(q, k, f * turn)[0], r(q, k, f)[1]))


def _gates(change: Callable[[nn.Module, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Plant:
    def plant(model: "PreTrainedModel", stack: Undo) -> None:
        for moe in _moes(model):
            if hasattr(moe.gate, "topk_method"):  # softmax routers
                gate = moe.gate
                shadow(stack, gate, "forward", lambda x, gate=gate: change(gate, x.reshape(-1, gate.hidden_dim)))

    return plant


def _bf16_router(gate: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(x.bfloat16(), gate.weight.bfloat16()).float()
    weights, chosen = logits.softmax(-1).topk(gate.top_k, dim=-1, sorted=False)
    return logits, weights * gate.routed_scaling_factor, chosen


def _sigmoid_router(gate: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(x.float(), gate.weight.float())
    weights, chosen = logits.sigmoid().topk(gate.top_k, dim=-1, sorted=False)
    return logits, weights * gate.routed_scaling_factor, chosen


def _shared(model: "PreTrainedModel", stack: Undo) -> None:
    for moe in _moes(model):
        handle = moe.shared_experts.register_forward_hook(lambda _module, _inputs, output: output * SHARED_FACTOR)
        stack.callback(handle.remove)


PLANTS: dict[Fault, Plant] = {
    Fault.INDEXER_ROPE_INTERLEAVED: _index_rope("interleaved"),
    Fault.INDEXER_ROPE_DIMS_LAST: _index_rope("last"),
    Fault.Q_LATENT_UNNORMED: _unnormed_latent,
    Fault.K_NORM_EPS: _k_norm_eps,
    Fault.K_NORM_NO_BIAS: _k_norm_no_bias,
    Fault.MSCALE_ALL_DIM_0: _mscale,
    Fault.EXPERTS_SWAPPED: _swap_experts,
    Fault.ROUTER_BIAS_MISSING: _router_bias,
    Fault.POSITIONS_OFF_BY_ONE: _positions,
    Fault.ROUTER_BF16: _gates(_bf16_router),
    Fault.SHARED_EXPERT_SCALED: _shared,
    Fault.SIGMOID_ROUTER: _gates(_sigmoid_router),
}
