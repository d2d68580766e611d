"""The chunked and the sparse op against the definition, forward and every gradient, and their promise: nothing of size
tokens x tokens.

What holds for every backend (plain loops, finite differences, packing, ties, refusals) is tested beside the reference.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron_patch.ops import by_length, chunked, dense_rows, index_selection, products, reference, sparse, sparse_rows
from megatron_patch.ops.backends import choose_backend

from .inputs import NAMES, make_inputs

SCALE = 0.37
LENGTHS = [1, 40, 0, 17, 2]
T = sum(LENGTHS)
# Relative to the largest element. Both sum in the same precision, in another order; sums have at most 40 terms of mixed
# sign. bf16: both compute in fp32, so where their difference crosses a rounding boundary they are one step of 2**-7 apart.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2**-7}


def run(op, inputs, *, topk=6, learn=NAMES, **options):
    """(result, gradients of NAMES, None where not in `learn`) of a loss of both parts with uneven weights."""
    result = op(**inputs, topk=topk, softmax_scale=SCALE, **options)
    noise = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    loss = 0
    if result.out.requires_grad:
        loss = loss + (result.out * noise.to(result.out.dtype)).sum()
    if result.indexer_kl.requires_grad:
        loss = loss + 0.7 * result.indexer_kl
    found = torch.autograd.grad(loss, [inputs[n] for n in learn], retain_graph=True)
    gradients = dict(zip(learn, found, strict=True))
    return result, [gradients.get(n) for n in NAMES]


def assert_same(ours, theirs, dtype):
    (a, a_gradients), (b, b_gradients) = ours, theirs
    assert torch.equal(a.indices, b.indices)
    names = ("out", "indexer_kl", "index_recall", *NAMES)
    for name, x, y in zip(names, [*a[:3], *a_gradients], [*b[:3], *b_gradients], strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape, name
        tolerance = TOLERANCE[x.dtype if name in (*NAMES, "out") else torch.promote_types(dtype, torch.float32)]
        torch.testing.assert_close(
            x, y, rtol=0, atol=tolerance * y.abs().max().item(), msg=lambda m, n=name: f"{n}: {m}"
        )


# Blocks of 15 rows of 40 keys in fp64, tiles of 4 rows and 16 keys, the last of them of 8 or 16: shapes that oneDNN is given.
TILES = {
    sparse: {"MASKED_POSITIONS": 1000},
    dense_rows: {"BLOCK_BYTES": 5000, "TILE_ROWS": 4, "TILE_KEYS": 16, "KEYS_STEP": 8},
    index_selection: {"_chunk_rows": lambda heads: 4, "TILE_KEYS": 16, "KEYS_STEP": 8},
}
# How the queries are cut: into one, an odd number that divides no document, more than there are. The sparse op has two ways
# to attend, of which it would take the masked one for most of these queries.
FORMS = {
    "chunked, 1 row": (chunked, {chunked: {"chunk_rows": lambda *_: 1}}),
    "chunked, 7 rows": (chunked, {chunked: {"chunk_rows": lambda *_: 7}}),
    "chunked, all rows": (chunked, {}),
    "sparse": (sparse, {}),
    "sparse, masked": (sparse, {sparse: {"MASKED_POSITIONS": 1000}}),
    "sparse, masked tiles": (sparse, TILES),
    "sparse, masked tiles, by torch.mm": (sparse, {**TILES, products: {"_onednn_is_wider": lambda: False}}),
    "sparse, 1 row": (
        sparse,
        {sparse: {"MASKED_POSITIONS": 0}, dense_rows: {"BLOCK_BYTES": 1, "TILE_ROWS": 1, "TILE_KEYS": 3}, sparse_rows: {"block_rows": lambda *_: 1}},
    ),
    "sparse, 7 rows, by PyTorch": (
        sparse,
        {
            sparse: {"MASKED_POSITIONS": 0},
            sparse_rows: {"block_rows": lambda *_: 7, "sampled_product": lambda *_: False},
        },
    ),
    "sparse, 7 rows": (sparse, {sparse: {"MASKED_POSITIONS": 0}, sparse_rows: {"block_rows": lambda *_: 7}}),
}


def choose_form(name, monkeypatch):
    module, how = FORMS[name]
    for owner, changes in how.items():
        for what, value in changes.items():
            monkeypatch.setattr(owner, what, value)
    return module


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """A module whose `dsa_attention` is under test."""
    return choose_form(request.param, monkeypatch)


@pytest.fixture(params=["chunked, all rows", "sparse, 7 rows"])
def one_form(request, monkeypatch):
    """One of each module, where the cut is of no interest."""
    return choose_form(request.param, monkeypatch)


@pytest.mark.parametrize("stage", ["dense", "sparse"])
@pytest.mark.parametrize("topk", [1, 6, 40, 100])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_the_reference(form, stage, topk, dtype):
    """Top-k below, at and above the longest document; documents of one token, none, and several chunks."""
    inputs = make_inputs(LENGTHS, dtype=dtype, index_heads=5)
    options = {"topk": topk, "stage": stage}
    assert_same(*(run(m.dsa_attention, inputs, **options) for m in (form, reference)), dtype)
    options["counted"] = torch.arange(T) % 3 > 0
    assert_same(*(run(m.dsa_attention, inputs, **options) for m in (form, reference)), dtype)


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_forced_selection_equals_the_references(form, stage):
    """The reference's own choice, one of other width and int64, and one that leaves the indexer's choice aside."""
    inputs = make_inputs(LENGTHS)
    begins = [b for b, n in zip(inputs["cu_seqlens"].tolist(), LENGTHS, strict=False) for _ in range(n)]
    window = torch.tensor([[max(b, t - 1), t, -1] if t > b else [t, -1, -1] for t, b in enumerate(begins)])
    own = reference.dsa_attention(**inputs, topk=6, softmax_scale=SCALE).indices
    for indices in (own, window):
        options = {"stage": stage, "indices": indices}
        ours, theirs = (run(m.dsa_attention, inputs, **options) for m in (form, reference))
        assert_same(ours, theirs, torch.float64)
        assert ours[0].indices.dtype == torch.int32 and torch.equal(ours[0].indices.long(), indices.long())


@pytest.mark.parametrize("kind", ["zero weights", "quantised", "signed zeros"])
def test_ties_go_to_the_newest_as_in_the_reference(form, kind):
    """Scores that tie exactly, in any order of summing: whole rows of zeros, few small integers, -0.0 beside 0.0."""
    inputs = make_inputs(LENGTHS, dtype=torch.float32)
    values = {n: inputs[n].detach().mul(2).round() for n in NAMES[3:]}
    if kind == "zero weights":
        values["index_weights"].zero_()
    elif kind == "signed zeros":
        values["index_weights"] = -values["index_weights"].abs()
        values["index_query"][:, :, 1:] = 0  # half of all products are cut to 0 by relu
    inputs |= {n: x.requires_grad_() for n, x in values.items()}
    ours, theirs = (run(m.dsa_attention, inputs) for m in (form, reference))
    assert_same(ours, theirs, torch.float32)


def test_a_broken_indexer_shows_as_in_the_reference(form):
    """NaN and infinite scores: the same keys, a KL of NaN, and no harm to the documents beside."""
    for value in (float("nan"), float("inf"), float("-inf")):
        inputs = make_inputs(LENGTHS)
        inputs["index_weights"].data[20] = value
        a, b = (m.dsa_attention(**inputs, topk=6, softmax_scale=SCALE) for m in (form, reference))
        assert torch.equal(a.indices, b.indices)
        assert a.indexer_kl.isnan() and b.indexer_kl.isnan()
        (ours,) = torch.autograd.grad(a.indexer_kl, inputs["index_query"])
        assert ours[20].isnan().any() and ours[41:].isfinite().all()


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_sharp_attention_stays_normalised(one_form, stage):
    """Logits of 1e5 in fp32: a saved log-sum-exp is exact to 1e-2 there, and probabilities from it would not sum to 1."""
    inputs = make_inputs([30], dtype=torch.float32)
    inputs["query"].data *= 1e5
    inputs["value"] = torch.ones_like(inputs["value"]).requires_grad_()
    result, gradients = run(one_form.dsa_attention, inputs, stage=stage)
    torch.testing.assert_close(result.out, torch.ones_like(result.out))
    noise = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).float()
    torch.testing.assert_close(gradients[2].sum(0), noise.sum(0), rtol=1e-4, atol=1e-4)  # each row's weights sum to 1
    assert all(g.isfinite().all() for g in gradients)


def test_forward_without_gradients_is_the_same_and_skips_their_work(form, monkeypatch):
    inputs = make_inputs(LENGTHS, dtype=torch.float32)
    with_grad = form.dsa_attention(**inputs, topk=6, softmax_scale=SCALE)
    monkeypatch.setattr(chunked, "_index_gradients", None)
    monkeypatch.setattr(sparse, "index_gradients", None)
    with torch.no_grad():
        without = form.dsa_attention(**inputs, topk=6, softmax_scale=SCALE)
    fixed = {n: x.detach() for n, x in inputs.items()}
    constant = form.dsa_attention(**fixed, topk=6, softmax_scale=SCALE)
    for other in (without, constant):
        assert not any(x.requires_grad for x in other)
        assert all(torch.equal(a, b) for a, b in zip(with_grad, other, strict=True))


@pytest.mark.parametrize("learn", [*((n,) for n in NAMES), NAMES[:3], NAMES[3:], ("value", "index_key")], ids="+".join)
def test_some_inputs_learn(one_form, learn):
    """Gradients do not depend on who else learns, and a result learns if and only if the reference's does."""
    inputs = make_inputs(LENGTHS)
    _, full = run(one_form.dsa_attention, inputs)
    some = {n: x.detach().requires_grad_(n in learn) if n in NAMES else x for n, x in inputs.items()}
    result, gradients = run(one_form.dsa_attention, some, learn=learn)
    for n, a, b in zip(NAMES, gradients, full, strict=True):
        assert a is None if n not in learn else torch.equal(a, b), n
    theirs = reference.dsa_attention(**some, topk=6, softmax_scale=SCALE)
    assert [x.requires_grad for x in result] == [x.requires_grad for x in theirs]


def test_two_micro_batches_in_flight(one_form):
    """A pipeline's order, forward 1, forward 2, backward 1, backward 2, and each backward a second time."""
    packs = [make_inputs(LENGTHS, seed=seed) for seed in (0, 1)]
    alone = [run(one_form.dsa_attention, p)[1] for p in packs]
    losses = []
    for p in packs:
        result = one_form.dsa_attention(**p, topk=6, softmax_scale=SCALE)
        noise = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        losses.append((result.out * noise).sum() + 0.7 * result.indexer_kl)
    for _ in range(2):
        for loss, p, expected in zip(losses, packs, alone, strict=True):
            got = torch.autograd.grad(loss, [p[n] for n in NAMES], retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_by_checkpoint(one_form, use_reentrant):
    inputs = make_inputs(LENGTHS)
    _, expected = run(one_form.dsa_attention, inputs)
    leaves = [inputs[n] for n in NAMES]
    cu_seqlens = inputs["cu_seqlens"]

    def op(*tensors):
        return tuple(one_form.dsa_attention(*tensors, cu_seqlens, topk=6, softmax_scale=SCALE))[:2]

    out, kl = checkpoint(op, *leaves, use_reentrant=use_reentrant)
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ((out * noise).sum() + 0.7 * kl).backward()
    assert all(torch.equal(x.grad, b) for x, b in zip(leaves, expected, strict=True))


def test_layouts_in_memory_do_not_matter(one_form):
    """Views with other strides, a key that all heads share by expansion, and an expanded gradient, as from sum()."""
    plain = make_inputs(LENGTHS)
    plain["key"] = plain["key"].detach()[:, :1].clone().requires_grad_()
    strided = dict(plain)
    for n in NAMES:
        strided[n] = plain[n].detach().movedim(0, -1).contiguous().movedim(-1, 0).requires_grad_()
    results = []
    for leaves, layout in ((plain, torch.Tensor.contiguous), (strided, lambda x: x)):
        inputs = leaves | {"key": layout(leaves["key"].expand(-1, 2, -1))}
        result = one_form.dsa_attention(**inputs, topk=6, softmax_scale=SCALE)
        results.append(torch.autograd.grad(result.out.sum() + result.indexer_kl, [leaves[n] for n in NAMES]))
    for n, a, b in zip(NAMES, *results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13, msg=n)


def test_a_second_derivative_is_refused(one_form):
    """Not left out in silence, also where the gradient that arrives is a constant."""
    inputs = make_inputs([5])
    result = one_form.dsa_attention(**inputs, topk=2, softmax_scale=SCALE)
    for loss in (result.out.sum(), result.out.square().sum(), result.indexer_kl):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(loss, [inputs[n] for n in NAMES], create_graph=True, allow_unused=True)


class Largest(TorchDispatchMode):
    """Bytes of the largest storage behind any tensor that an operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.layout == torch.strided:  # a sparse tensor's parts are seen by themselves
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return result


def _largest_and_kept(op, tokens, stage):
    """(bytes of the largest tensor in forward and backward, bytes that forward saves)."""
    inputs = make_inputs([tokens], dtype=torch.float32, heads=4, index_heads=8)
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with Largest() as mode, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run(op, inputs, topk=16, stage=stage)
    return mode.nbytes, sum(x.untyped_storage().nbytes() for x in kept.values())


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_memory_is_a_chunk_times_the_tokens(stage, monkeypatch):
    """No tensor above the budget although one head's probabilities are; what is saved grows like the tokens."""
    budget = 2**18
    monkeypatch.setattr(chunked, "CHUNK_BYTES", budget)
    largest, kept = _largest_and_kept(chunked.dsa_attention, 512, stage)
    assert largest <= budget < 4 * 512 * 512
    assert largest >= budget / 8  # else the rows are fewer than the budget allows
    assert _largest_and_kept(chunked.dsa_attention, 1024, stage)[1] == pytest.approx(2 * kept, rel=0.01)
    theirs, theirs_kept = _largest_and_kept(reference.dsa_attention, 512, stage)
    assert theirs >= 8 * 4 * 512 * 512 and theirs_kept > 20 * kept  # the measure sees what it is to see


def test_chunk_rows():
    """Short documents in one chunk, the budget kept in long ones, a row at least where even one is over it."""
    assert chunked.chunk_rows(256, 4, 4) == 256
    rows = chunked.chunk_rows(4096, 16, 64)
    assert 32 <= rows < 4096  # fewer rows make slow products
    assert rows * 4096 * 4 * (64 + 2 * 16) < chunked.CHUNK_BYTES
    assert chunked.chunk_rows(4096, 16, 64, 8) < rows < chunked.chunk_rows(4096, 16, 0)
    assert chunked.chunk_rows(10**8, 16, 64) == 1


@pytest.mark.parametrize(("lengths", "module"), [([3, 8, 0, 5], "chunked"), ([3, 9, 1], "sparse"), ([9], "sparse")])
def test_by_length_goes_by_the_longest_document(lengths, module, monkeypatch):
    monkeypatch.setattr(by_length, "LONG_DOCUMENT", 8)
    monkeypatch.setattr({"chunked": sparse, "sparse": chunked}[module], "dsa_attention", None)
    inputs = make_inputs(lengths)
    assert_same(*(run(m.dsa_attention, inputs) for m in (by_length, reference)), torch.float64)


def test_auto_goes_by_length_on_a_cpu_and_is_chunked_on_a_gpu():
    assert choose_backend("auto", "cpu").attention is by_length.dsa_attention
    assert choose_backend("auto", "cuda").attention is chunked.dsa_attention
    assert choose_backend("sparse", "cpu").attention is sparse.dsa_attention
    for device in ("cpu", "cuda"):
        assert choose_backend("reference", device).attention is reference.dsa_attention
    with pytest.raises(ValueError, match="unknown DSA backend 'fast': this release has auto, reference, chunked, sparse, by-length, npu"):
        choose_backend("fast", "cpu")
    with pytest.raises(ValueError, match="runs on cpu, cuda, npu, not on 'xpu'"):
        choose_backend("chunked", "xpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_on_a_gpu(stage):
    here = make_inputs(LENGTHS)
    there = {n: x.detach().cuda().requires_grad_(x.requires_grad) for n, x in here.items()}
    results = []
    for inputs in (here, there):
        result = chunked.dsa_attention(**inputs, topk=6, softmax_scale=SCALE, stage=stage)
        gradients = torch.autograd.grad(result.out.square().sum() + result.indexer_kl, [inputs[n] for n in NAMES])
        results.append([x.cpu() for x in (*result, *gradients)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
