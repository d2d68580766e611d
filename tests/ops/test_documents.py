"""Packing: documents laid end to end must not notice each other, and padding must not count."""

import pytest
import torch

from .inputs import NAMES, make_inputs


def _run(dsa_attention, inputs, **options):
    """Result, and gradients of (out weighted by position-independent noise) and of the KL."""
    result = dsa_attention(**inputs, topk=3, softmax_scale=0.5, **options)
    noise = torch.linspace(-1, 1, result.out[0].numel(), dtype=result.out.dtype).view_as(result.out[0])
    loss = (result.out * noise).sum() + result.indexer_kl
    return result, torch.autograd.grad(loss, [inputs[n] for n in NAMES])


@pytest.mark.parametrize("stage", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changing_one_document_leaves_the_other_bit_equal(dsa_attention, stage, dtype):
    """Output, indices and every gradient of document B, when each input of document A changes (also to NaN)."""
    inputs = make_inputs([7, 9], dtype=dtype)
    first, gradients = _run(dsa_attention, inputs, stage=stage)
    for value in (None, float("nan")):
        changed = dict(inputs)
        for n in NAMES:
            x = inputs[n].detach().clone()
            x[:7] = x[:7].flip(0) * 3 if value is None else value
            changed[n] = x.requires_grad_()
        second, gradients_2 = _run(dsa_attention, changed, stage=stage)
        assert not torch.equal(first.out[:7], second.out[:7])
        assert torch.equal(first.out[7:], second.out[7:])
        assert torch.equal(first.indices[7:], second.indices[7:])
        for n, a, b in zip(NAMES, gradients, gradients_2, strict=True):
            assert torch.equal(a[7:], b[7:]), n


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_a_pack_is_its_documents_one_by_one(dsa_attention, stage):
    inputs = make_inputs([5, 1, 8], dtype=torch.float32)
    pack, gradients = _run(dsa_attention, inputs, stage=stage)
    kl = recall = 0.0
    for begin, end in ((0, 5), (5, 6), (6, 14)):
        alone = {n: inputs[n].detach()[begin:end].clone().requires_grad_() for n in NAMES}
        alone["cu_seqlens"] = torch.tensor([0, end - begin], dtype=torch.int32)
        one, one_gradients = _run(dsa_attention, alone, stage=stage)
        assert torch.equal(pack.out[begin:end], one.out)
        width = one.indices.shape[1]
        assert torch.equal(pack.indices[begin:end, :width], torch.where(one.indices >= 0, one.indices + begin, -1))
        assert (pack.indices[begin:end, width:] == -1).all()
        for n, a, b in zip(NAMES, gradients, one_gradients, strict=True):
            assert torch.equal(a[begin:end], b), n
        kl, recall = kl + one.indexer_kl.item(), recall + one.index_recall.item()
    assert pack.indexer_kl.item() == pytest.approx(kl, rel=1e-6)
    assert pack.index_recall.item() == pytest.approx(recall, rel=1e-6)


def test_later_tokens_do_not_reach_back(dsa_attention):
    """Causality, bit for bit: cutting the document short changes nothing before the cut."""
    inputs = make_inputs([10], dtype=torch.float32)
    whole = dsa_attention(**inputs, topk=4, softmax_scale=0.5)
    poisoned = {n: inputs[n].detach().clone() for n in NAMES}
    for n in NAMES:
        poisoned[n][6:] = 1e3
    other = dsa_attention(**poisoned, cu_seqlens=inputs["cu_seqlens"], topk=4, softmax_scale=0.5)
    assert torch.equal(whole.out[:6], other.out[:6])
    assert torch.equal(whole.indices[:6], other.indices[:6])


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_uncounted_queries_are_in_neither_sum(dsa_attention, stage):
    """Padding in its own document: KL, recall and the indexer's gradient are those of the pack without it."""
    padded = make_inputs([6, 4], dtype=torch.float32)
    counted = torch.arange(10) < 6
    a, gradients = _run(dsa_attention, padded, stage=stage, counted=counted)
    real = {n: padded[n].detach()[:6].clone().requires_grad_() for n in NAMES}
    real["cu_seqlens"] = torch.tensor([0, 6], dtype=torch.int32)
    b, real_gradients = _run(dsa_attention, real, stage=stage)
    assert a.indexer_kl.item() == b.indexer_kl.item() and a.index_recall.item() == b.index_recall.item()
    for n, x, y in zip(NAMES[3:], gradients[3:], real_gradients[3:], strict=True):
        assert torch.equal(x[:6], y), n
        assert not x[6:].any(), n


def test_counting_nothing_is_zero_not_nan(dsa_attention):
    """A rank whose share is all padding must still give a KL that can be added and differentiated."""
    inputs = make_inputs([4], dtype=torch.float32)
    result, gradients = _run(dsa_attention, inputs, counted=torch.zeros(4, dtype=torch.bool))
    assert result.indexer_kl.item() == 0.0 and result.index_recall.item() == 0.0
    assert all(not g.any() for g in gradients[3:])


def test_sums_over_queries_add_up(dsa_attention):
    """Sum, not mean: counting two halves separately gives the whole, so micro-batches can be added."""
    inputs = make_inputs([9])
    whole = dsa_attention(**inputs, topk=3, softmax_scale=0.5)
    half = torch.arange(9) % 2 == 0
    parts = [dsa_attention(**inputs, topk=3, softmax_scale=0.5, counted=c) for c in (half, ~half)]
    assert sum(p.indexer_kl.item() for p in parts) == pytest.approx(whole.indexer_kl.item(), rel=1e-12)
    assert sum(p.index_recall.item() for p in parts) == pytest.approx(whole.index_recall.item(), rel=1e-12)
