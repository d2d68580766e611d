"""Which keys are chosen: the one place where "almost equal" means a different model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_patch.ops.reference import select_topk

from .inputs import NAMES, as_sets, make_inputs

NOT = float("-inf")


def test_newest_wins_ties_and_rows_are_ascending():
    scores = torch.tensor([[1.0, 0.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 5.0, 5.0, 1.0, 5.0]])
    assert select_topk(scores, 3).tolist() == [[0, 3, 4], [2, 3, 4], [1, 2, 4]]


def test_short_rows_end_in_minus_one():
    scores = torch.tensor([[0.5, NOT, NOT], [0.0, 0.1, NOT], [NOT, NOT, NOT]])
    assert select_topk(scores, 2).tolist() == [[0, -1], [0, 1], [-1, -1]]
    assert select_topk(scores, 9).shape == (3, 3)
    assert select_topk(scores, 2).dtype == torch.int64


def test_negative_zero_ties_with_zero():
    """A negative weight times relu's zero is -0.0; if a sort told it from 0.0 the set would depend on the device."""
    assert select_topk(torch.tensor([[0.0, -0.0, 0.0, -0.0]]), 2).tolist() == [[2, 3]]


def test_nan_is_not_hidden(dsa_attention):
    """A NaN score must reach the loss; dropping the key would let a broken indexer train on in silence."""
    assert select_topk(torch.tensor([[1.0, float("nan"), 2.0]]), 1).tolist() == [[1]]
    inputs = make_inputs([5])
    inputs["index_weights"].data[3] = float("nan")
    assert dsa_attention(**inputs, topk=2, softmax_scale=1.0).indexer_kl.isnan()


@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, NOT]), min_size=7, max_size=7), min_size=1, max_size=4
    ),
    k=st.integers(1, 9),
)
@settings(max_examples=150, deadline=None)
def test_equals_pythons_own_sort(rows, k):
    expected = []
    for row in rows:
        order = sorted((s for s in range(7) if row[s] > NOT), key=lambda s: (row[s], s), reverse=True)
        expected.append(sorted(order[:k]))
    assert as_sets(select_topk(torch.tensor(rows), k)) == expected


@given(left=st.integers(0, 5), right=st.integers(0, 5), seed=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_padding_changes_nothing(left, right, seed):
    """Cached, left-padded and right-padded forwards see the same scores among more masked keys."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(-1, 2, (4, 9), generator=g).float()
    padded = torch.nn.functional.pad(scores, (left, right), value=NOT)
    plain = as_sets(select_topk(scores, 4))
    assert [[s - left for s in row] for row in as_sets(select_topk(padded, 4))] == plain


@pytest.mark.parametrize("zero", ["index_query", "index_key", "index_weights"])
def test_zero_indexer_is_a_sliding_window(dsa_attention, zero):
    """All scores equal: the k newest keys, with gradients recorded or not (torch.topk's order would be arbitrary)."""
    inputs = make_inputs([4, 9], dtype=torch.float32)
    inputs[zero] = torch.zeros_like(inputs[zero]).requires_grad_()
    with_grad = dsa_attention(**inputs, topk=3, softmax_scale=1.0).indices
    with torch.no_grad():
        without = dsa_attention(**inputs, topk=3, softmax_scale=1.0).indices
    window = [list(range(max(b, t - 2), t + 1)) for b, e in ((0, 4), (4, 13)) for t in range(b, e)]
    assert as_sets(with_grad) == window
    assert torch.equal(with_grad, without)


def test_grad_and_no_grad_choose_alike_with_many_ties(dsa_attention):
    """A public run had gradient norms of 392 because its two forwards chose differently."""
    inputs = make_inputs([40], dtype=torch.float32, index_heads=1)
    inputs["index_query"] = inputs["index_query"].detach().round().requires_grad_()
    inputs["index_key"] = inputs["index_key"].detach().round().requires_grad_()
    inputs["index_weights"] = torch.ones_like(inputs["index_weights"]).requires_grad_()
    a = dsa_attention(**inputs, topk=8, softmax_scale=1.0)
    with torch.no_grad():
        b = dsa_attention(**inputs, topk=8, softmax_scale=1.0)
    assert torch.equal(a.indices, b.indices) and torch.equal(a.out, b.out)


def test_forced_selection_is_used(dsa_attention):
    """Replaying recorded indices must give the recorded result; another set must give another one."""
    inputs = make_inputs([6, 5])
    own = dsa_attention(**inputs, topk=3, softmax_scale=1.0)
    replay = dsa_attention(**inputs, topk=3, softmax_scale=1.0, indices=own.indices)
    for name in ("out", "indexer_kl", "index_recall", "indices"):
        assert torch.equal(getattr(own, name), getattr(replay, name)), name
    window = torch.tensor([[max(b, t - 1), t] if t > b else [t, -1] for b, e in ((0, 6), (6, 11)) for t in range(b, e)])
    other = dsa_attention(**inputs, topk=3, softmax_scale=1.0, indices=window)
    assert not torch.allclose(other.out, own.out)
    assert other.indices.tolist() == window.tolist() and other.indices.dtype == torch.int32


def test_forced_selection_has_no_effect_on_the_dense_stages_output(dsa_attention):
    inputs = make_inputs([6])
    newest = torch.arange(6)[:, None]
    own = dsa_attention(**inputs, topk=3, softmax_scale=1.0, stage="dense")
    forced = dsa_attention(**inputs, topk=3, softmax_scale=1.0, stage="dense", indices=newest)
    assert torch.equal(own.out, forced.out) and torch.equal(own.indexer_kl, forced.indexer_kl)
    assert forced.index_recall < own.index_recall


@pytest.mark.parametrize(
    "rows, message",
    [
        ([[0], [1], [3], [3]], "future or in another document"),
        ([[0], [1], [1], [3]], "future or in another document"),
        ([[0, -1], [1, 0], [2, -1], [3, -1]], "ascending and distinct"),
        ([[0, -1], [1, 1], [2, -1], [3, -1]], "ascending and distinct"),
        ([[0, -1], [-1, 1], [2, -1], [3, -1]], "ascending and distinct"),
        ([[0], [-1], [2], [3]], "ascending and distinct"),
        ([[0], [1], [2]], "indices must be int32"),
    ],
)
def test_forced_selection_is_checked(dsa_attention, rows, message):
    """A selected future or foreign key is a defect, always; here documents are [0, 1] and [2, 3]."""
    inputs = make_inputs([2, 2])
    with pytest.raises(ValueError, match=message):
        dsa_attention(**inputs, topk=2, softmax_scale=1.0, indices=torch.tensor(rows, dtype=torch.int32))


def test_k_must_be_positive():
    with pytest.raises(ValueError, match="at least 1"):
        select_topk(torch.zeros(1, 3), 0)


def test_inputs_are_left_alone(dsa_attention):
    inputs = make_inputs([5])
    before = {n: inputs[n].detach().clone() for n in NAMES}
    dsa_attention(**inputs, topk=2, softmax_scale=1.0)
    assert all(torch.equal(before[n], inputs[n]) for n in NAMES)
