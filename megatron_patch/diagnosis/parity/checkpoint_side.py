"""The checkpoint's side: a Hugging Face directory through transformers, recorded, and with forced routes or selections."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_patch.diagnosis.parity.records import (
    DTYPES,
    Dump,
    digest,
    flat,
    hook,
    indices_of,
    log_probs_of,
    selected_of,
    shadow,
)
from megatron_patch.io.safetensors_dir import SafetensorsDir

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Documents:
    """The document that runs at present: one forward pass each, as an engine serves them."""

    def __init__(self, cu_seqlens: Tensor):
        self.bounds = cu_seqlens.tolist()
        self.now = slice(0, 0)

    def __iter__(self) -> Iterator[slice]:
        for begin, end in zip(self.bounds[:-1], self.bounds[1:], strict=True):
            self.now = slice(begin, end)
            yield self.now


@torch.no_grad()
def run_model(
    model: "PreTrainedModel",
    tokens: Tensor,
    cu_seqlens: Tensor,
    *,
    record: bool = False,
    routes: Mapping[int, Tensor] | None = None,
    selections: Mapping[int, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Log-probs (and records) of a pack, document by document.

    Args:
        model: loaded, in evaluation mode.
        tokens, cu_seqlens: the pack.
        record: also everything else that `records` names.
        routes: layer -> fp32 [T, X]: experts with a weight are chosen; the weights are the model's own.
        selections: layer -> int [T, S]: the keys that queries attend to.
    """
    documents = Documents(cu_seqlens)
    parts: dict[str, list[Tensor]] = {}
    logits = []
    with contextlib.ExitStack() as stack:
        for number, layer in enumerate(model.base_model.layers):
            if record:
                _record_layer(stack, layer, f"layers.{number}.", parts)
            if routes and number in routes:
                _force_routes(stack, layer.mlp, routes[number], documents)
            if selections and number in selections and hasattr(layer.self_attn, "index_selector"):
                _force_selection(stack, layer.self_attn, selected_of(selections[number]), documents)
        for document in documents:
            out = model(input_ids=tokens[None, document].to(model.device), use_cache=False)
            logits.append(out.logits[0].float().cpu())
    return _joined(parts, documents) | log_probs_of(torch.cat(logits), tokens, cu_seqlens)


def dump_checkpoint(
    model: "PreTrainedModel",
    directory: Path,
    tokens: Tensor,
    cu_seqlens: Tensor,
    *,
    topk: int | None,
    environment: dict[str, str],
    dtype: str,
) -> Dump:
    """Run a pack and record it."""
    tensors = {"tokens": tokens, "cu_seqlens": cu_seqlens} | run_model(model, tokens, cu_seqlens, record=True)
    source = SafetensorsDir(directory)
    # As the model holds them: in bf16 from a directory in fp32 they are rounded.
    weights = {name: digest(source.load(name).to(DTYPES[dtype])) for name in source}
    return Dump("checkpoint", str(directory), dtype, topk, environment, tensors, weights)


def _record_layer(stack: contextlib.ExitStack, layer: nn.Module, prefix: str, parts: dict[str, list[Tensor]]) -> None:
    def keep(name: str, value: Tensor) -> None:
        parts.setdefault(prefix + name, []).append(value.detach().to("cpu", copy=True))

    def before(_module, args, kwargs):
        keep("input", flat(args[0] if args else kwargs["hidden_states"]))

    stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
    hook(stack, layer.input_layernorm, lambda out: keep("norm", flat(out)))
    hook(stack, layer.self_attn, lambda out: keep("attention", flat(out[0])))
    hook(stack, layer.post_attention_layernorm, lambda out: keep("post_norm", flat(out)))
    hook(stack, layer, lambda out: keep("output", flat(out[0] if isinstance(out, tuple) else out)))
    if hasattr(layer.self_attn, "index_selector"):
        _record_selection(stack, layer.self_attn, keep)
    if not hasattr(layer.mlp, "experts"):
        hook(stack, layer.mlp, lambda out: keep("mlp", flat(out)))
        return
    number = layer.mlp.gate.weight.size(0)

    def routes(_module, args, kwargs):
        index, weight = (args[1], args[2]) if len(args) > 2 else (kwargs["top_k_index"], kwargs["top_k_weights"])
        dense = torch.zeros(len(index), number, dtype=torch.float32, device=index.device)
        keep("router", dense.scatter(-1, index, weight.float()))

    stack.callback(layer.mlp.experts.register_forward_pre_hook(routes, with_kwargs=True).remove)
    hook(stack, layer.mlp.experts, lambda out: keep("experts", flat(out)))
    hook(stack, layer.mlp.shared_experts, lambda out: keep("shared", flat(out)))


def _record_selection(stack: contextlib.ExitStack, attention: nn.Module, keep) -> None:
    scores = attention.indexer.scores

    def observed(*args, **kwargs):
        result = scores(*args, **kwargs)
        keep("indexer", result[0])
        return result

    shadow(stack, attention.indexer, "scores", observed)
    shadow(stack, attention, "selection_observer", lambda chosen: keep("indices", chosen[0]))


def _joined(parts: dict[str, list[Tensor]], documents: Documents) -> dict[str, Tensor]:
    """Records of documents as records of the pack; [n, n] of a document becomes a block of [T, T]."""
    lengths = [end - begin for begin, end in zip(documents.bounds[:-1], documents.bounds[1:], strict=True)]
    joined = {}
    for name, pieces in parts.items():
        if name.endswith((".indexer", ".indices")):
            if len(pieces) < len(lengths):  # short documents were not scored
                pieces = _with_gaps(pieces, lengths)
            joined[name] = torch.block_diag(*pieces)
        else:
            joined[name] = torch.cat(pieces)
    selected = {name: value for name, value in joined.items() if name.endswith(".indices")}
    return joined | {name: indices_of(value.bool()) for name, value in selected.items()}


def _with_gaps(pieces: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """A piece for each document: zeros for those that gave none."""
    left = iter(pieces)
    longest = min(len(piece) for piece in pieces)
    return [next(left) if length >= longest else torch.zeros(length, length) for length in lengths]


def _force_routes(stack: contextlib.ExitStack, moe: nn.Module, routes_TX: Tensor, documents: Documents) -> None:
    gate = moe.gate
    forward = gate.forward

    def forced(hidden: Tensor, *args):
        logits, weights, _ = forward(hidden, *args)
        chosen = routes_TX[documents.now].to(logits.device).topk(weights.size(-1), dim=-1).indices
        scores = logits.softmax(-1, dtype=torch.float32)
        return logits, scores.gather(-1, chosen) * gate.routed_scaling_factor, chosen

    shadow(stack, gate, "forward", forced)


def _force_selection(stack: contextlib.ExitStack, attention: nn.Module, selected_TT: Tensor, documents: Documents) -> None:
    def select(scores: Tensor, k: int) -> Tensor:
        now = documents.now
        return selected_TT[now, now][None].to(scores.device)

    shadow(stack, attention, "index_selector", select)
