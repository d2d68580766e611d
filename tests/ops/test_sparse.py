"""What the sparse op adds to the chunked one: its way to choose keys, what it leaves out, what it keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron_patch.ops import dense_rows, index_selection, products, reference, sparse, sparse_rows
from megatron_patch.ops.backends import BACKENDS

from .inputs import NAMES, make_inputs
from .test_fast_forms import SCALE, _largest_and_kept, run

NAN, INF = float("nan"), float("inf")


@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0, INF, -INF, NAN]), min_size=8, max_size=8),
        min_size=1,
        max_size=4,
    ),
    k=st.integers(1, 7),
)
@settings(max_examples=300, deadline=None)
def test_a_partial_sort_chooses_as_the_definition(rows, k):
    """Ties, infinities and NaN, at the boundary and elsewhere."""
    scores = torch.tensor(rows)
    chosen = index_selection._largest(scores, k)
    assert chosen.dtype == torch.int32 and chosen.tolist() == reference.select_topk(scores, k).tolist()


@pytest.mark.parametrize("tile_keys", [1, 5, 2048])
def test_tiles_cover_every_key(tile_keys, monkeypatch):
    monkeypatch.setattr(index_selection, "TILE_KEYS", tile_keys)
    inputs = [make_inputs([23])[n].detach() for n in NAMES[3:]]
    chosen, score = torch.full((23, 6), -1, dtype=torch.int32), torch.full((23, 6), -INF, dtype=torch.float64)
    index_selection.select_document(*inputs, 6, None, (chosen, score))
    causal = torch.ones(23, 23, dtype=torch.bool).tril()
    expected = reference.index_scores(*inputs).masked_fill(~causal, -INF)
    assert torch.equal(chosen.long(), reference.select_topk(expected, 6))
    theirs = expected.gather(1, chosen.clamp(min=0).long()).masked_fill(chosen < 0, -INF)
    torch.testing.assert_close(score, theirs, rtol=1e-12, atol=1e-14)


def test_minus_infinity_is_not_chosen_where_all_keys_are():
    """Queries with fewer keys than top-k skip the sort, but not its rule."""
    inputs = make_inputs([6])
    inputs["index_weights"].data[3] = -INF
    ours, theirs = (m.dsa_attention(**inputs, topk=6, softmax_scale=SCALE).indices for m in (sparse, reference))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_broken_head_does_not_reach_the_others(monkeypatch, compiled):
    """The heads of a block share one buffer of logits, which PyTorch multiplies by zero instead of overwriting it."""
    if not compiled:
        monkeypatch.setattr(sparse_rows, "sampled_product", lambda *_: False)
    monkeypatch.setattr(sparse, "MASKED_POSITIONS", 0)
    inputs = make_inputs([30])
    whole, gradients = run(sparse.dsa_attention, inputs)
    inputs["query"].data[:, 0] = NAN
    broken, broken_gradients = run(sparse.dsa_attention, inputs)
    assert broken.out[:, 0].isnan().all() and torch.equal(broken.out[:, 1], whole.out[:, 1])
    for a, b in zip(gradients[:3], broken_gradients[:3], strict=True):
        assert torch.equal(a[:, 1], b[:, 1])


@pytest.mark.parametrize("name", BACKENDS)
def test_recall_is_left_out_where_nobody_asks(name):
    inputs = make_inputs([40, 17])
    for stage in ("dense", "sparse"):
        with_recall, gradients = run(BACKENDS[name].attention, inputs, stage=stage)
        without, same = run(BACKENDS[name].attention, inputs, stage=stage, recall=False)
        assert without.index_recall is None and with_recall.index_recall > 0
        assert torch.equal(with_recall.out, without.out) and torch.equal(with_recall.indexer_kl, without.indexer_kl)
        assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))


class Pairs(TorchDispatchMode):
    """Pairs of a query and a key in products sampled at a pattern."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._overloadpacket is torch.ops.aten.sparse_sampled_addmm:
            self.number += args[0]._nnz()
        return function(*args, **(kwargs or {}))


def test_work_is_that_of_the_selected_keys(monkeypatch):
    """No dense product but the index scores, and three sampled ones a head: logits, logits again, d out . value."""
    monkeypatch.setattr(sparse_rows, "sampled_product", lambda *_: False)
    monkeypatch.setattr(index_selection, "KEYS_STEP", 1)
    monkeypatch.setattr(products, "_onednn_is_wider", lambda: False)  # PyTorch's counter does not know oneDNN's operator
    tokens, topk, heads, dim, value_dim, index_heads, index_dim = 256, 8, 2, 5, 3, 3, 4
    inputs = make_inputs([tokens], dtype=torch.float32)
    early = sparse.masked_rows(tokens, topk)
    with Pairs() as pairs, FlopCounterMode(display=False) as counted:
        run(sparse.dsa_attention, inputs, topk=topk, recall=False)
    assert pairs.number == 3 * heads * (tokens - early) * topk
    chunk = max(16, 512 // index_heads)  # a chunk's scores have a square of future ones at their end
    scores = 2 * index_heads * (index_dim + 1) * (tokens * (tokens + 1) // 2 + tokens * chunk // 2)
    backward = 2 * index_heads * (3 * index_dim + 1) * tokens * topk
    masked = 2 * heads * early * early * (4 * dim + 3 * value_dim)
    assert counted.get_total_flops() <= scores + backward + masked
    assert counted.get_total_flops() < 2 * heads * tokens**2 * (4 * dim + 3 * value_dim) + scores  # a dense op's


def test_memory_grows_like_the_tokens(monkeypatch):
    """At fixed top-k nothing is of size tokens x tokens; kept are the inputs, and two numbers a selected pair."""
    monkeypatch.setattr(index_selection, "SCORE_BYTES", 2**17)
    monkeypatch.setattr(index_selection, "TILE_BYTES", 2**17)
    monkeypatch.setattr(dense_rows, "BLOCK_BYTES", 2**17)

    def op(*args, **kwargs):
        return sparse.dsa_attention(*args, **kwargs, recall=False)

    largest, kept = _largest_and_kept(op, 512, "sparse")
    longer, longer_kept = _largest_and_kept(op, 1024, "sparse")
    assert longer <= 2.2 * largest and largest < 4 * 512 * 512 / 2
    numbers = 4 * (2 * 5 + 3) + 8 * 4 + 4 + 8  # of query, key, value; of the indexer's three inputs
    loss = 4 * 3  # the factors of `run`'s own loss
    assert kept == 512 * 4 * (numbers + loss + 2 * 16) and longer_kept == 2 * kept


def test_blocks_hold_as_many_pairs_a_key_whatever_the_selection():
    assert sparse_rows.block_rows(4096, 256) * 256 == sparse_rows.block_rows(4096, 1024) * 1024 == 4096 * sparse_rows.PAIRS_A_KEY
