"""The Ascend backend through an emulator of its operators' documents: equal to the definition, and inside every limit.

Nothing here has run on a device: what the tests show is that the backend asks what the documents allow, in the layouts
that they name, and makes of the answers what the definition says.
"""

import dataclasses

import pytest
import torch

from megatron_patch.ops import npu, npu_limits, reference
from megatron_patch.ops.backends import BACKENDS, choose_backend
from megatron_patch.ops.checks import DsaSizes

from .npu_contract import Contract, RefusedError

SCALE = 0.37
NAMES = ("query", "query_rope", "latent", "key_rope", "index_query", "index_key", "index_weights")
V2_LITE = DsaSizes(16, 512, 64, 64, 128, 2048, torch.bfloat16)
PACKED, BATCH = [1, 12, 0, 5, 2], [8, 8]  # of several lengths, of one
# Of the largest element. fp64: the order of sums. bf16: one rounding (2**-8 of a value) of what both compute in fp32, and
# for the KL's gradients a second one, of the operator's result.
TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 2**-6}


@pytest.fixture
def contract(monkeypatch):
    """Call it for the emulator, installed as torch_npu."""

    def install(wide: bool = False) -> Contract:
        module = Contract(wide)
        monkeypatch.setitem(__import__("sys").modules, "torch_npu", module)
        return module

    return install


def make(lengths, heads, sizes=(6, 4, 16, 8), dtype=torch.float64, seed=0):
    """Leaves of `absorbed_attention` and its cu_seqlens; `sizes`: latent, RoPE, index heads, index head. 16 index heads: with
    3, an eighth of the scores are exact zeros, and the order of ties is the operator's own."""
    latent, rope, index_heads, index_dim = sizes
    g, t = torch.Generator().manual_seed(seed), sum(lengths)
    shapes = ((t, heads, latent), (t, heads, rope), (t, latent), (t, rope), (t, index_heads, index_dim), (t, index_dim))
    leaves = [torch.randn(*shape, generator=g, dtype=torch.float64) / shape[-1] ** 0.25 for shape in shapes]
    leaves.append(torch.randn(t, index_heads, generator=g, dtype=torch.float64) / (index_heads * index_dim) ** 0.5)
    kinds = [dtype] * 6 + [torch.promote_types(dtype, torch.float32)]
    leaves = [x.to(kind).requires_grad_() for x, kind in zip(leaves, kinds, strict=True)]
    return dict(zip(NAMES, leaves, strict=True)), torch.tensor([0, *lengths]).cumsum(0).int()


def definition(query, query_rope, latent, key_rope, index_query, index_key, index_weights, cu_seqlens, **options):
    heads = query.shape[1]
    key = torch.cat([latent, key_rope], -1)[:, None].expand(-1, heads, -1)
    value = latent[:, None].expand(-1, heads, -1)
    index = index_query, index_key, index_weights
    return reference.dsa_attention(torch.cat([query, query_rope], -1), key, value, *index, cu_seqlens, **options)


def run(op, leaves, cu_seqlens, **options):
    """(result, gradients by name) of a loss of both parts with uneven weights."""
    result = op(**leaves, cu_seqlens=cu_seqlens, softmax_scale=SCALE, **options)
    noise = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    loss = (result.out * noise.to(result.out.dtype)).sum() + 0.7 * result.indexer_kl
    return result, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def assert_equal(ours, theirs, *, recall=True):
    (a, a_gradients), (b, b_gradients) = ours, theirs
    assert torch.equal(a.indices, b.indices)
    pairs = {"out": (a.out, b.out), "kl": (a.indexer_kl, b.indexer_kl)}
    pairs |= {name: (a_gradients[name], b_gradients[name]) for name in a_gradients}
    if recall:
        pairs["recall"] = (a.index_recall, b.index_recall)
    tolerance = TOLERANCE[torch.bfloat16 if a.out.dtype == torch.bfloat16 else torch.float64]
    for name, (x, y) in pairs.items():
        assert x.dtype == y.dtype and x.shape == y.shape, name
        bound = tolerance * max(y.abs().max().item(), 1e-3)
        torch.testing.assert_close(x, y, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(params=["chunked", "fused"])
def kl(request, monkeypatch):
    """Both forms of the KL at small sizes."""
    if request.param == "fused":
        monkeypatch.setattr(npu_limits, "KL_HEADS", (2, 4))
        monkeypatch.setattr(npu_limits, "KL_TOPK", (4, 40))
    return request.param


@pytest.mark.parametrize("lengths, layout", [(PACKED, "TND"), (BATCH, "BSND"), ([9], "BSND")])
@pytest.mark.parametrize("topk", [4, 40])
def test_equals_the_reference(contract, kl, lengths, layout, topk):
    """Top-k below and above the documents, packed and as a batch: result and every gradient."""
    module = contract(wide=True)
    leaves, ends = make(lengths, heads=4)
    assert_equal(run(npu.absorbed_attention, leaves, ends, topk=topk), run(definition, leaves, ends, topk=topk), recall=kl == "chunked")
    third = [("kl", layout)] if kl == "fused" else []
    assert module.calls == [("indexer", layout), ("attention", layout), *third]
    assert module.ascending, "an order that a parallel top-k may change decides the order of sums"


@pytest.mark.parametrize("real", [0, 3, 15, 16])
@pytest.mark.parametrize("lengths", [BATCH, [4, 12]])
def test_padding_is_not_counted(contract, kl, lengths, real):
    contract(wide=True)
    leaves, ends = make(lengths, heads=2)
    options = {"topk": 4, "counted": torch.arange(16) < real}
    assert_equal(run(npu.absorbed_attention, leaves, ends, **options), run(definition, leaves, ends, **options), recall=kl == "chunked")


def test_the_fused_kl_refuses_other_holes(contract, monkeypatch):
    contract(wide=True)
    monkeypatch.setattr(npu_limits, "fused_kl", lambda *sizes: (True, ""))
    monkeypatch.setattr(npu, "fused_kl", lambda *sizes: (True, ""))
    leaves, ends = make([8], heads=2)
    with pytest.raises(ValueError, match="first tokens"):
        npu.absorbed_attention(**leaves, cu_seqlens=ends, topk=4, softmax_scale=SCALE, counted=torch.arange(8) > 2)


@pytest.mark.parametrize("lengths", [PACKED, BATCH])
def test_a_recorded_selection_is_used_again(contract, kl, lengths):
    """What recomputation does: the indexer's operator is not asked a second time."""
    module = contract(wide=True)
    leaves, ends = make(lengths, heads=2)
    first = run(npu.absorbed_attention, leaves, ends, topk=4)
    module.calls.clear()
    again = run(npu.absorbed_attention, leaves, ends, topk=4, indices=first[0].indices)
    assert "indexer" not in dict(module.calls)
    assert_equal(again, first, recall=kl == "chunked")
    window = torch.where(first[0].indices[:, :2] >= 0, first[0].indices[:, :2], -1)
    options = {"topk": 4, "indices": window}
    assert_equal(run(npu.absorbed_attention, leaves, ends, **options), run(definition, leaves, ends, **options), recall=kl == "chunked")


@pytest.mark.parametrize("lengths", [[30, 10], [20, 20]])
def test_v2_lite_in_bf16_inside_every_limit(contract, lengths):
    """Its real sizes with a top-k that selects: the emulator refuses what the documents refuse."""
    module = contract()
    leaves, ends = make(lengths, 16, (512, 64, 64, 128), torch.bfloat16)
    npu_limits.check(dataclasses.replace(V2_LITE, topk=8))
    assert_equal(run(npu.absorbed_attention, leaves, ends, topk=8), run(definition, leaves, ends, topk=8))
    assert [name for name, _ in module.calls] == ["indexer", "attention"]


def test_a_model_of_32_heads_in_bf16_with_the_fused_kl(contract):
    module = contract()
    leaves, ends = make([13, 7], 32, (512, 64, 8, 128), torch.bfloat16)
    options = {"topk": 1024, "counted": torch.arange(20) < 18}
    ours = run(npu.absorbed_attention, leaves, ends, **options)
    assert_equal(ours, run(definition, leaves, ends, **options), recall=False)
    assert module.calls[-1] == ("kl", "TND")
    assert ours[0].index_recall.isnan() and not ours[0].index_recall.requires_grad, "what is not computed is no number"
    # A recorded selection is as wide as the longest document; the operator takes no less than a thousand slots.
    assert_equal(run(npu.absorbed_attention, leaves, ends, indices=ours[0].indices, **options), ours, recall=False)


def test_16_heads_take_the_chunked_kl_because_the_operator_refuses_them(contract, monkeypatch):
    """The rule, the operator's refusal, and the line that a run prints."""
    contract()
    assert npu_limits.describe(V2_LITE) == "KL chunked: the fused operator takes 32, 64 or 128 attention heads, not 16"
    assert npu_limits.describe(dataclasses.replace(V2_LITE, heads=32)).startswith("KL fused")
    leaves, ends = make([6, 4], 16, (512, 64, 64, 128), torch.bfloat16)
    monkeypatch.setattr(npu, "fused_kl", lambda *sizes: (True, "asked for all the same"))
    with pytest.raises(RefusedError, match="32, 64 or 128, not 16"):
        npu.absorbed_attention(**leaves, cu_seqlens=ends, topk=2048, softmax_scale=SCALE)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"heads": 24}, "1, 2, 4, 8, 16, 32, 64 or 128 heads, not 24"),
        ({"latent_dim": 256}, "latent of 512, not 256"),
        ({"rope_dim": 32}, "64 RoPE dimensions, not 32"),
        ({"index_heads": 65}, "at most 64 index heads, not 65"),
        ({"index_dim": 64}, "index heads of 128, not 64"),
        ({"topk": 2049}, "top-k up to 2048, or 3072"),
        ({"dtype": torch.float32}, "bfloat16 or float16, not torch.float32"),
    ],
)
def test_a_limit_is_named(contract, change, words):
    """Beside another one: all that is wrong is said at once."""
    contract()
    npu_limits.check(V2_LITE)
    with pytest.raises(ValueError, match=words):
        npu_limits.check(dataclasses.replace(V2_LITE, **change))
    with pytest.raises(ValueError, match=words):
        npu_limits.check(dataclasses.replace(V2_LITE, **({"dtype": torch.float64} | change)))


@pytest.mark.parametrize(
    "sizes, fused",
    [((32, 64, 2048), True), ((128, 8, 1024), True), ((16, 64, 2048), False), ((32, 4, 2048), False), ((32, 64, 512), False),
     ((32, 64, 2048, 8193), False), ((32, 64, 2048, 8192), True), ((32, 64, 2048, 9, 256), True), ((32, 64, 2048, 9, 257), False)],
)  # fmt: skip
def test_the_rule_of_the_kl(sizes, fused):
    got, why = npu_limits.fused_kl(*sizes)
    assert got is fused and ("fused operator" in why)


def test_a_torch_npu_without_the_operators_is_named(contract, monkeypatch):
    module = contract()
    monkeypatch.delattr(Contract, "npu_sparse_flash_attention")
    with pytest.raises(ValueError, match="torch_npu contract has no npu_sparse_flash_attention"):
        npu_limits.check(V2_LITE)
    monkeypatch.setitem(__import__("sys").modules, "torch_npu", None)
    with pytest.raises(ValueError, match="needs torch_npu"):
        npu_limits.check(V2_LITE)
    assert module.calls == []


def test_attention_without_a_gradient_is_an_error(contract, monkeypatch):
    """An operator whose backward is not registered returns a constant: the model would train on its indexer's loss alone."""
    module = contract(wide=True)
    kernel = Contract.npu_sparse_flash_attention
    monkeypatch.setattr(Contract, "npu_sparse_flash_attention", lambda *a, **k: tuple(x.detach() for x in kernel(*a, **k)))
    leaves, ends = make([8], heads=2)
    with pytest.raises(RuntimeError, match="has no gradient"):
        npu.absorbed_attention(**leaves, cu_seqlens=ends, topk=4, softmax_scale=SCALE)
    with torch.no_grad():
        npu.absorbed_attention(**leaves, cu_seqlens=ends, topk=4, softmax_scale=SCALE)
    assert module.calls


@pytest.mark.parametrize("lengths", [PACKED, BATCH])
def test_inputs_of_any_strides_are_taken(contract, kl, lengths):
    """The operators take contiguous tensors alone; slices and products of a layer are not."""
    contract(wide=True)
    leaves, ends = make(lengths, heads=2)
    strided = {name: x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for name, x in leaves.items()}
    assert not any(x.is_contiguous() for x in strided.values())
    assert_equal(run(npu.absorbed_attention, strided, ends, topk=4), run(npu.absorbed_attention, leaves, ends, topk=4), recall=kl == "chunked")


@pytest.mark.parametrize("limit, value", [("KL_MAX_QUERIES", 8), ("KL_MAX_DOCUMENTS", 1)])
def test_a_pack_that_the_fused_kl_does_not_take_is_chunked(contract, kl, monkeypatch, limit, value):
    """A rule of the pack, asked in each step; one document of 9 tokens and two of 8."""
    module = contract(wide=True)
    for lengths, taken in (([9], limit != "KL_MAX_QUERIES"), ([8, 8], limit != "KL_MAX_DOCUMENTS")):
        monkeypatch.setattr(npu_limits, limit, value)
        module.calls.clear()
        leaves, ends = make(lengths, heads=2)
        ours = run(npu.absorbed_attention, leaves, ends, topk=4)
        assert ("kl" in dict(module.calls)) is (kl == "fused" and taken)
        assert_equal(ours, run(definition, leaves, ends, topk=4), recall="kl" not in dict(module.calls))


def test_a_wrong_shape_is_named():
    leaves, ends = make([8], heads=2)
    leaves["latent"] = leaves["latent"][:, :5]
    with pytest.raises(ValueError, match=r"latent must be \[8, 6\]"):
        npu.absorbed_attention(**leaves, cu_seqlens=ends, topk=4, softmax_scale=SCALE)


def test_ties_are_the_operators_own(contract):
    """The one difference in selection: the definition takes the newest of equal scores. No key is future or foreign."""
    contract(wide=True)
    leaves, ends = make([6, 2], heads=2)
    leaves["index_weights"] = torch.zeros_like(leaves["index_weights"]).requires_grad_()
    options = {"cu_seqlens": ends, "topk": 2, "softmax_scale": SCALE}
    assert npu.absorbed_attention(**leaves, **options).indices.tolist()[4:] == [[0, 1], [0, 1], [6, -1], [6, 7]]
    assert definition(**leaves, **options).indices.tolist()[4:] == [[3, 4], [4, 5], [6, -1], [6, 7]]


def test_sorting_keeps_the_tail():
    rows = torch.tensor([[5, 2, 0, -1], [3, -1, -1, -1], [7, 16777215, 1, 4]], dtype=torch.int32)
    assert npu.ascending(rows).tolist() == [[0, 2, 5, -1], [3, -1, -1, -1], [1, 4, 7, 16777215]]
    assert npu.ascending(rows).dtype == torch.int32


def test_the_backend_is_chosen_on_npu_devices_only():
    assert choose_backend("auto", "npu") is BACKENDS["npu"]
    assert choose_backend("chunked", "npu").absorbed is None
    with pytest.raises(ValueError, match="runs on npu, not on 'cpu'"):
        choose_backend("npu", "cpu")
