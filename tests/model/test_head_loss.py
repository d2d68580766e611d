"""The chunked loss equals the one from whole logits: values, gradients, through the model and over ranks."""

import pytest
import torch
import torch.nn.functional as F

from megatron_patch.model.builder import forward_pack
from megatron_patch.model.head_loss import head_loss
from tests.model.build import tiny_model


def inputs(tokens=37, words=101, hidden=24, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(words, hidden, generator=generator, dtype=dtype)
    labels = torch.randint(0, words, (tokens,), generator=generator)
    arriving = torch.randn(tokens, generator=generator)
    return x, weight, labels, arriving


def whole(x, weight, labels):
    return F.cross_entropy((x @ weight.T).float(), labels, reduction="none")


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000, None])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_values_and_gradients(chunk, dtype, tolerance):
    x, weight, labels, arriving = inputs(dtype=dtype)
    losses = head_loss(x, weight, labels, chunk=chunk)
    (gradient,) = torch.autograd.grad((losses * arriving).sum(), x)
    expected = whole(x, weight, labels)
    (right,) = torch.autograd.grad((expected * arriving).sum(), x)
    assert losses.dtype == torch.float32
    assert (losses - expected).abs().max() <= tolerance * expected.abs().max()
    assert (gradient - right).norm() <= tolerance * right.norm()


def test_extreme_logits_stay_finite():
    x, weight, labels, _ = inputs(dtype=torch.float32)
    losses = head_loss(x * 1e4, weight, labels)
    assert losses.isfinite().all() and torch.allclose(losses, whole(x * 1e4, weight, labels), rtol=1e-5)


def test_nan_is_not_hidden():
    x, weight, labels, _ = inputs(dtype=torch.float32)
    assert head_loss(x.detach().index_fill(0, torch.tensor([3]), torch.nan), weight, labels)[3].isnan()


def test_nothing_of_the_size_of_the_logits_is_kept():
    """Saved for the backward pass: one tensor like the hidden states."""
    x, weight, labels, _ = inputs(dtype=torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        head_loss(x, weight, labels, chunk=8)
    assert kept == [x.numel()]


def test_without_gradients_no_gradient_is_computed(monkeypatch):
    x, weight, labels, _ = inputs(dtype=torch.float32)
    products = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **out: products.append(a.shape) or multiply(a, b, **out))
    with torch.no_grad():
        head_loss(x, weight, labels, chunk=8)
    assert len(products) == 5  # one a chunk


def test_a_second_derivative_is_refused():
    x, weight, labels, _ = inputs(dtype=torch.float32)
    (gradient,) = torch.autograd.grad(head_loss(x, weight, labels).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_trainable_head_is_refused():
    x, weight, labels, _ = inputs(dtype=torch.float32)
    with pytest.raises(ValueError, match="frozen head"):
        head_loss(x, weight.requires_grad_(), labels)


@pytest.mark.parametrize("freeze", [True, False])
def test_the_models_loss_is_that_of_its_logits(device, tiny_base, freeze):
    """With a trainable head megatron-core's own path is taken; both are the cross entropy of the model's logits."""
    model, _, _ = tiny_model(tiny_base, init="copy", freeze=freeze)
    tokens = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1))
    bounds = torch.tensor([0, 25, 40], dtype=torch.int32)
    labels = tokens.roll(-1)
    expected = F.cross_entropy(forward_pack(model, tokens, bounds).float(), labels, reduction="none")
    found = forward_pack(model, tokens, bounds, labels)
    assert (found - expected).abs().max() <= 1e-5
    trained = [p for p in model.parameters() if p.requires_grad]
    ours = torch.autograd.grad(found.sum(), trained, allow_unused=True, retain_graph=True)
    right = torch.autograd.grad(expected.sum(), trained, allow_unused=True)
    for a, b in zip(ours, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a - b).norm() <= 1e-5 * b.norm() + 1e-8


def over_ranks() -> float:
    """Largest difference on this rank between shared and whole vocabulary, losses and gradients."""
    import torch.distributed as dist

    x, weight, labels, arriving = inputs(words=100, dtype=torch.float32)
    part = weight.chunk(2)[dist.get_rank()].contiguous()
    losses = head_loss(x, part, labels, dist.group.WORLD, chunk=8)
    (gradient,) = torch.autograd.grad((losses * arriving).sum(), x)
    expected = whole(x, weight, labels)
    (right,) = torch.autograd.grad((expected * arriving).sum(), x)
    return max(float((losses - expected).abs().max()), float((gradient - right).abs().max()))


def test_a_vocabulary_that_two_ranks_share(two_ranks):
    assert max(two_ranks.run(over_ranks)) <= 1e-4


def test_layers_get_the_strides_of_a_contiguous_tensor(tiny_base):
    """A stride that does not matter makes oneDNN's bf16 product hundreds of times slower (`head_loss._natural_strides`)."""
    model, _, _ = tiny_model(tiny_base)
    found = []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda _module, _args, kwargs: found.append(kwargs["hidden_states"]), with_kwargs=True)
    forward_pack(model, torch.arange(6), torch.tensor([0, 6], dtype=torch.int32))
    assert len(found) == len(model.decoder.layers)
    assert all(hidden.stride() == (hidden.size(2), hidden.size(2), 1) for hidden in found)
