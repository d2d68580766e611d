"""Packing in the whole model: documents laid end to end train as if each were alone (WrinkleFree 53)."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_patch.model.builder import forward_pack
from tests.model.build import TINY_DSA, tiny_model

LENGTHS = (18, 1, 23, 12)  # three of them longer than index_topk = 8, so that the selection matters
CUTS = torch.tensor([0, 18, 19, 42, 54], dtype=torch.int32)
TOKENS = torch.randint(3, 320, (54,), generator=torch.Generator().manual_seed(11))
LABELS = torch.randint(3, 320, (54,), generator=torch.Generator().manual_seed(12))
assert max(LENGTHS) > TINY_DSA.index_topk


class Result(NamedTuple):
    """Logits [T, V], each DSA layer's selected positions, and every trainable parameter's gradient."""

    logits: Tensor
    indices: list[Tensor]
    gradients: dict[str, Tensor | None]


def run(model, state, tokens: Tensor, cuts: Tensor, counted: Tensor, labels: Tensor) -> Result:
    """Forward twice (logits; loss and KL of the counted tokens) and backward."""
    seen: list[Tensor] = []
    for layer in model.decoder.layers[3:]:
        attention = layer.self_attention
        inner = getattr(attention, "recorded_backend", attention.backend)
        attention.recorded_backend = inner

        def record(*a, inner=inner, **k):
            result = inner.attention(*a, **k)
            seen.append(result.indices)
            return result

        attention.backend = type(inner)("recorded", ("cpu",), record)
    state.counted, state.kl_grad_scale = counted, 1.0
    model.train()
    model.zero_grad()
    with torch.no_grad():
        logits = forward_pack(model, tokens, cuts)
    indices = list(seen)
    losses = forward_pack(model, tokens, cuts, labels)
    (losses * counted).sum().backward()
    return Result(logits, indices, {n: p.grad for n, p in model.named_parameters() if p.requires_grad})


def shifted(indices: Tensor, offset: int) -> list[list[int]]:
    return [sorted(int(i) - offset for i in row if i >= 0) for row in indices]


@pytest.fixture
def model_and_state(device, tiny_base):
    model, state, _ = tiny_model(tiny_base, init="copy")
    return model, state


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_changing_one_document_leaves_the_others_untouched(model_and_state, stage):
    """Logits, indices and gradients of what follows document A, when all of A's tokens change.

    The indices are equal; logits and gradients to fp32 rounding, since experts multiply the tokens of all documents at
    once, and a matrix product's rounding depends on its shape (the op by itself is bit-equal: tests/ops/test_documents.py).
    """
    model, state = model_and_state
    state.stage = stage
    counted = torch.arange(54) >= 18  # A's own loss and KL would reach the weights
    changed = TOKENS.clone()
    changed[:18] = changed[:18].flip(0) // 2
    a, b = (run(model, state, tokens, CUTS, counted, LABELS) for tokens in (TOKENS, changed))
    assert (a.logits[:18] - b.logits[:18]).abs().max() > 1e-2
    torch.testing.assert_close(a.logits[18:], b.logits[18:], atol=1e-5, rtol=0)
    for first, second in zip(a.indices, b.indices, strict=True):
        assert torch.equal(first[18:], second[18:])
    for name, gradient in a.gradients.items():
        other = b.gradients[name]
        if gradient is None or other is None:  # an expert that only A's tokens were routed to, if anyone's
            left = gradient if other is None else other
            assert left is None or not left.any(), name
            continue
        scale = gradient.abs().max().item()
        torch.testing.assert_close(gradient, other, atol=1e-5 * max(scale, 1e-3), rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_bit_equal_where_no_expert_mixes_the_documents(model_and_state, monkeypatch):
    """With every token sent through every expert, shapes do not depend on the tokens, and nothing of A is left in B."""
    model, state = model_and_state
    for layer in model.decoder.layers[1:]:
        monkeypatch.setattr(layer.mlp.router, "topk", layer.mlp.config.num_moe_experts)
    counted = torch.arange(54) >= 18
    changed = TOKENS.clone()
    changed[:18] = changed[:18].flip(0) // 2
    a, b = (run(model, state, tokens, CUTS, counted, LABELS) for tokens in (TOKENS, changed))
    assert not torch.equal(a.logits[:18], b.logits[:18])
    assert torch.equal(a.logits[18:], b.logits[18:])
    for first, second in zip(a.indices, b.indices, strict=True):
        assert torch.equal(first[18:], second[18:])
    differing = [name for name, gradient in a.gradients.items() if not torch.equal(gradient, b.gradients[name])]
    assert not differing


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_a_pack_equals_its_documents_one_by_one(model_and_state, stage):
    """Logits and selection of each document, and the sum of the gradients, to 1e-5."""
    model, state = model_and_state
    state.stage = stage
    everything = torch.ones(54, dtype=torch.bool)
    pack = run(model, state, TOKENS, CUTS, everything, LABELS)
    summed: dict[str, Tensor] = {}
    for begin, end in zip(CUTS[:-1].tolist(), CUTS[1:].tolist(), strict=True):
        span, alone = slice(begin, end), torch.tensor([0, end - begin], dtype=torch.int32)
        one = run(model, state, TOKENS[span], alone, everything[span], LABELS[span])
        torch.testing.assert_close(pack.logits[span], one.logits, atol=1e-5, rtol=0)
        for packed, single in zip(pack.indices, one.indices, strict=True):
            assert shifted(packed[span], begin) == shifted(single, 0)
        for name, gradient in one.gradients.items():
            if gradient is not None:
                summed[name] = summed[name] + gradient if name in summed else gradient.clone()
    for name, gradient in pack.gradients.items():
        if gradient is None:
            assert name not in summed, name
            continue
        atol = 1e-5 * max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(gradient, summed[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
