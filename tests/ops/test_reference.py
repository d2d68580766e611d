"""What DSA is, of each backend: plain Python loops beside it, and finite differences beside its gradients."""

import pytest
import torch

from megatron_patch.ops.reference import index_scores

from .inputs import NAMES, as_sets, by_hand, make_inputs

SCALE = 0.37


@pytest.mark.parametrize("stage", ["dense", "sparse"])
@pytest.mark.parametrize("topk", [1, 3, 50])
@pytest.mark.parametrize("lengths", [[9], [1, 7, 4], [3, 0, 5]])
def test_equals_plain_loops(dsa_attention, stage, topk, lengths):
    """Without it the equations could be anything: forward, KL, recall and sets, all stages, packed and not."""
    inputs = make_inputs(lengths)
    result = dsa_attention(**inputs, topk=topk, softmax_scale=SCALE, stage=stage)
    out, kls, recalls, sets = by_hand(inputs, topk=topk, scale=SCALE, stage=stage)
    torch.testing.assert_close(result.out, torch.tensor(out, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    assert result.indexer_kl.item() == pytest.approx(sum(kls), rel=1e-9, abs=1e-12)
    assert result.index_recall.item() == pytest.approx(sum(recalls), rel=1e-10)
    assert as_sets(result.indices) == sets
    assert result.indices.shape == (sum(lengths), min(topk, max(lengths)))
    assert result.indices.dtype == torch.int32


def test_scores_are_equation_one():
    """Weights may be negative and relu cuts each head before the sum; neither order is interchangeable."""
    query = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    key = torch.tensor([[3.0, -1.0], [-3.0, 1.0]])
    weights = torch.tensor([[0.5, -0.25]])
    assert index_scores(query, key, weights).tolist() == [[1.5, -0.5]]
    assert index_scores(query.bfloat16(), key.bfloat16(), weights).dtype == torch.float32


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_gradients_of_out_by_finite_differences(dsa_attention, stage):
    inputs = make_inputs([5, 3])
    fixed = {n: inputs[n].detach() for n in NAMES[3:]}

    def out(query, key, value):
        cu = inputs["cu_seqlens"]
        return dsa_attention(query, key, value, **fixed, cu_seqlens=cu, topk=2, softmax_scale=SCALE, stage=stage).out

    assert torch.autograd.gradcheck(out, tuple(inputs[n] for n in NAMES[:3]))


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_gradients_of_kl_by_finite_differences(dsa_attention, stage):
    """The set is held fixed: it is no function one can differentiate, and a step could flip a near-tie."""
    inputs = make_inputs([5, 3])
    fixed = {n: inputs[n].detach() for n in NAMES[:3]}
    chosen = dsa_attention(**inputs, topk=2, softmax_scale=SCALE).indices

    def kl(index_query, index_key, index_weights):
        return dsa_attention(
            **fixed, index_query=index_query, index_key=index_key, index_weights=index_weights,
            cu_seqlens=inputs["cu_seqlens"], topk=2, softmax_scale=SCALE, stage=stage, indices=chosen,
        ).indexer_kl  # fmt: skip

    assert torch.autograd.gradcheck(kl, tuple(inputs[n] for n in NAMES[3:]))


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_kl_gradient_has_its_closed_form(dsa_attention, stage):
    """d KL / d I = softmax(I) - p: what faster backends compute. One index head of weight 1 makes I visible."""
    inputs = make_inputs([6], index_heads=1, index_dim=6)
    score = (torch.rand(6, 6, dtype=torch.float64) + 0.1).requires_grad_()  # relu(score) = score
    result = dsa_attention(
        *(inputs[n] for n in NAMES[:3]), score[:, None, :], torch.eye(6, dtype=torch.float64),
        torch.ones(6, 1, dtype=torch.float64), inputs["cu_seqlens"], topk=3, softmax_scale=SCALE, stage=stage,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(result.indexer_kl, score)
    allowed = torch.ones(6, 6).tril().bool()
    if stage == "sparse":
        chosen = torch.zeros(6, 6, dtype=torch.bool)
        for t, row in enumerate(as_sets(result.indices)):
            chosen[t, row] = True
        allowed &= chosen
    logits = torch.einsum("qhd,khd->hqk", inputs["query"], inputs["key"]).detach() * SCALE
    p = logits.masked_fill(~allowed, float("-inf")).softmax(-1).mean(0)
    q = score.detach().masked_fill(~allowed, float("-inf")).softmax(-1)
    torch.testing.assert_close(gradient, q - p, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_each_loss_reaches_its_own_parameters_only(dsa_attention, stage):
    """The indexer must learn from the KL alone and the model from the language loss alone (report, section 2.1)."""
    inputs = make_inputs([6, 4])
    result = dsa_attention(**inputs, topk=3, softmax_scale=SCALE, stage=stage)
    tensors = [inputs[n] for n in NAMES]
    from_out = torch.autograd.grad(result.out.square().sum(), tensors, retain_graph=True, allow_unused=True)
    from_kl = torch.autograd.grad(result.indexer_kl, tensors, allow_unused=True)
    assert all(g is not None and g.abs().sum() > 0 for g in from_out[:3]) and all(g is None for g in from_out[3:])
    assert all(g is None for g in from_kl[:3]) and all(g is not None and g.abs().sum() > 0 for g in from_kl[3:])
    assert not result.index_recall.requires_grad and not result.indices.requires_grad


def test_topk_of_all_keys_is_dense_attention(dsa_attention):
    """With k >= length nothing is left out, so both stages and torch's own attention agree, and recall is 1."""
    inputs = make_inputs([11], dtype=torch.float32)
    sparse = dsa_attention(**inputs, topk=11, softmax_scale=SCALE)
    dense = dsa_attention(**inputs, topk=3, softmax_scale=SCALE, stage="dense")
    q, k, v = (inputs[n].transpose(0, 1) for n in NAMES[:3])
    torch_own = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE).transpose(0, 1)
    torch.testing.assert_close(sparse.out, dense.out, rtol=0, atol=5e-7)  # two modules may sum in two orders
    assert sparse.indexer_kl.item() == pytest.approx(dense.indexer_kl.item(), rel=1e-6)
    torch.testing.assert_close(sparse.out, torch_own, rtol=1e-5, atol=1e-6)
    assert sparse.index_recall.item() == pytest.approx(11, rel=1e-6)


def test_sparse_is_dense_attention_with_a_mask(dsa_attention):
    inputs = make_inputs([12], dtype=torch.float32)
    result = dsa_attention(**inputs, topk=4, softmax_scale=SCALE)
    mask = torch.zeros(12, 12, dtype=torch.bool)
    for t, row in enumerate(as_sets(result.indices)):
        mask[t, row] = True
    q, k, v = (inputs[n].transpose(0, 1) for n in NAMES[:3])
    masked = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE).transpose(0, 1)
    torch.testing.assert_close(result.out, masked, rtol=1e-5, atol=1e-6)
    assert result.index_recall.item() < 12 - 1e-3


def test_kl_survives_a_probability_of_zero(dsa_attention):
    """0 * log 0 = 0: an attention so sharp that other keys underflow must give a finite KL and finite gradients."""
    inputs = make_inputs([8], dtype=torch.float32)
    for stage in ("dense", "sparse"):
        result = dsa_attention(**inputs, topk=5, softmax_scale=1e4, stage=stage)
        gradients = torch.autograd.grad(result.indexer_kl, [inputs[n] for n in NAMES[3:]])
        assert result.indexer_kl.isfinite() and result.indexer_kl > 0
        assert all(g.isfinite().all() for g in gradients)


def test_bf16_is_fp32_rounded_once(dsa_attention):
    """bf16 inputs are exact fp32 numbers: the result is the fp32 one, `out` rounded at the very end, the rest not."""
    low = make_inputs([10], dtype=torch.bfloat16)
    high = {n: x.detach().float() if x.is_floating_point() else x for n, x in low.items()}
    a = dsa_attention(**low, topk=4, softmax_scale=SCALE)
    b = dsa_attention(**high, topk=4, softmax_scale=SCALE)
    assert a.out.dtype == torch.bfloat16 and torch.equal(a.out, b.out.bfloat16())
    assert a.indexer_kl.dtype == torch.float32 and a.indexer_kl.item() == b.indexer_kl.item()
    assert a.index_recall.dtype == torch.float32 and torch.equal(a.indices, b.indices)


def _change(**changes):
    return lambda inputs: inputs | {n: f(inputs[n]) for n, f in changes.items()}


@pytest.mark.parametrize(
    "broken, message",
    [
        (_change(key=lambda x: x[:, :1]), "query and key must be"),
        (_change(value=lambda x: x[:-1]), "query and key must be"),
        (_change(index_key=lambda x: x[:, :2]), "index_query must be"),
        (_change(index_weights=lambda x: x[:, :1]), "index_query must be"),
        (_change(index_query=lambda x: x[:, 0]), "index_query must be"),
        (_change(index_weights=lambda x: x.bfloat16()), "index_weights must be float32"),
        (_change(query=lambda x: x.long(), key=lambda x: x.long()), "floating point"),
        (_change(cu_seqlens=lambda x: x[:-1]), "cu_seqlens must start"),
        (_change(cu_seqlens=lambda x: x[1:]), "cu_seqlens must start"),
        (_change(cu_seqlens=lambda x: x.flip(0)), "cu_seqlens must start"),
        (_change(cu_seqlens=lambda x: x.float()), "cu_seqlens must be int32"),
        (lambda i: i | {"counted": torch.ones(7)}, "counted must be bool"),
        (lambda i: i | {"counted": torch.ones(3, dtype=torch.bool)}, "counted must be bool"),
        (lambda i: i | {"topk": 0}, "topk must be at least 1"),
        (lambda i: i | {"stage": "warmup"}, "stage must be"),
    ],
)
def test_refuses_what_would_broadcast(dsa_attention, broken, message):
    inputs = {"topk": 2, "softmax_scale": SCALE, **make_inputs([4, 3])}
    with pytest.raises(ValueError, match=message):
        dsa_attention(**broken(inputs))
