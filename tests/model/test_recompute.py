"""Recomputed DSA layers: the gradients of the layers that kept everything, also with two micro-batches in flight."""

import dataclasses

import pytest
import torch

from megatron_patch.model.builder import forward_pack
from megatron_patch.model.dsa_state import DENSE, SPARSE
from megatron_patch.ops.backends import choose_backend
from tests.model.build import tiny_model

PACKS = ((20, 1, 33), (40, 17))  # lengths of the documents of two micro-batches; the model's top-k is 8


def two_micro_batches(base, stage: str, **flags):
    """(model, state, gradients): both forward passes, then both backward passes, as a pipeline runs them."""
    model, state, _ = tiny_model(base, init="copy", aux_loss_coeff=0.1, **flags)
    model.train()
    generator = torch.Generator().manual_seed(5)
    totals = []
    for number, lengths in enumerate(PACKS):
        n = sum(lengths)
        tokens = torch.randint(0, 320, (n + 1,), generator=generator)
        ends = torch.tensor((0, *lengths)).cumsum(0).int()
        state.stage, state.kl_grad_scale = stage, 0.5 + number
        state.counted = torch.arange(n) % 3 > 0
        totals.append(forward_pack(model, tokens[:-1], ends, tokens[1:]).sum())
    state.stage, state.kl_grad_scale, state.counted = DENSE, 0.0, None  # what the backward passes find
    for total in totals:
        total.backward()
    return model, state, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("stage", [DENSE, SPARSE])
@pytest.mark.parametrize("name", ["reference", "chunked", "sparse"])
def test_gradients_and_reports_are_equal(device, tiny_base, stage, name):
    backend = choose_backend(name, "cpu")
    _, kept_state, kept = two_micro_batches(tiny_base, stage, backend=backend)
    _, state, recomputed = two_micro_batches(tiny_base, stage, recompute=True, backend=backend)
    assert kept.keys() == recomputed.keys()
    for name, gradient in kept.items():
        assert torch.equal(gradient, recomputed[name]), name
    assert any(gradient.abs().max() > 0 for name, gradient in kept.items() if "indexer" in name)
    assert state.means() == kept_state.means() and state.tokens == kept_state.tokens


def test_the_second_pass_takes_the_keys_of_the_first(device, tiny_base):
    """A backend whose own choice differs from call to call, as sums in any order can make it."""
    real = choose_backend("auto", "cpu")
    calls = []

    def fickle(*args, topk, **kwargs):
        calls.append(kwargs["indices"])
        return real.attention(*args, topk=topk if len(calls) <= 4 else 1, **kwargs)

    backend = dataclasses.replace(real, attention=fickle)
    _, _, kept = two_micro_batches(tiny_base, SPARSE)
    _, _, recomputed = two_micro_batches(tiny_base, SPARSE, recompute=True, backend=backend)
    assert len(calls) == 8 and all(x is None for x in calls[:4]) and all(x is not None for x in calls[4:])
    assert all(torch.equal(gradient, recomputed[name]) for name, gradient in kept.items())


def test_less_is_kept(device, tiny_base):
    def kept_bytes(recompute: bool) -> int:
        seen: dict[int, int] = {}

        def pack(tensor):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        model, state, _ = tiny_model(tiny_base, init="copy", recompute=recompute)
        state.counted = None
        tokens = torch.arange(200) % 320
        parameters = sum(p.untyped_storage().nbytes() for p in model.parameters())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward_pack(model, tokens, torch.tensor([0, 200]).int(), tokens).sum()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        assert parameters > 0
        return sum(size for pointer, size in seen.items() if pointer not in weights)

    assert kept_bytes(True) < 0.5 * kept_bytes(False)


def test_without_gradients_nothing_is_recomputed(device, tiny_base):
    model, state, _ = tiny_model(tiny_base, init="copy", recompute=True)
    tokens = torch.arange(30) % 320
    with torch.no_grad():
        logits = forward_pack(model, tokens, torch.tensor([0, 30]).int())
    assert state.recorded is None and logits.isfinite().all()
