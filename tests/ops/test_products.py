"""Products by oneDNN: equal to PyTorch's own, given only what oneDNN is fast at, in few shapes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patch.ops import index_selection, products, sparse

from .inputs import NAMES, make_inputs

NAN, INF = float("nan"), float("inf")


class Shapes(TorchDispatchMode):
    """(M, K, N) of the products that oneDNN is given, and whether any of them has gaps that it is slow at."""

    def __init__(self):
        super().__init__()
        self.seen, self.gaps = set(), False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._overloadpacket is torch.ops.mkldnn._linear_pointwise:
            left, right = args[:2]
            self.seen.add((*left.shape, len(right)))
            self.gaps |= 1 not in left.stride() or not (right.is_contiguous() or right.T.is_contiguous())
        return function(*args, **(kwargs or {}))


@pytest.fixture(params=[True, False], ids=["oneDNN", "mm"])
def by_onednn(request, monkeypatch):
    if request.param and not products._onednn_is_wider():
        pytest.skip("this processor has no AVX-512")
    monkeypatch.setattr(products, "_onednn_is_wider", lambda: request.param)
    return request.param


def matrix(rows: int, columns: int, layout: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=generator)
    if layout == "columns":
        return x.T.contiguous().T
    if layout == "rows with gaps":
        return torch.cat([x, x], 1)[:, :columns]
    return torch.stack([x, x], 2)[..., 0] if layout == "gaps" else x


LAYOUTS = ["rows", "columns", "rows with gaps", "gaps"]


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("sizes", [(5, 7, 3), (1, 4, 2), (4, 1, 1), (0, 3, 2), (3, 0, 2), (3, 2, 0)], ids=str)
def test_equals_mm(by_onednn, left, right, sizes):
    m, k, n = sizes
    a, b = matrix(m, k, left), matrix(n, k, right)
    with Shapes() as shapes:
        result = products.product(a, b, True)
    torch.testing.assert_close(result, a @ b.T, rtol=1e-5, atol=1e-5)
    assert not shapes.gaps and bool(shapes.seen) <= by_onednn
    if by_onednn and min(sizes) > 1 and "gaps" not in (left, right) and right != "rows with gaps":
        assert shapes.seen == {sizes}


def test_nan_and_infinity_spread(by_onednn):
    a, b = matrix(20, 40, "rows"), matrix(30, 40, "rows")
    a[3, 3], a[5, 5], b[2, 2] = NAN, INF, -INF
    torch.testing.assert_close(products.product(a, b, True), a @ b.T, equal_nan=True)


def test_other_precisions_and_irregular_shapes_are_torchs():
    for dtype in (torch.float64, torch.bfloat16):
        a, b = matrix(4, 8, "rows").to(dtype), matrix(2, 8, "rows").to(dtype)
        with Shapes() as shapes:
            assert torch.equal(products.product(a, b, True), a @ b.T)
            assert torch.equal(products.product(a.float(), b.float(), False), a.float() @ b.float().T)
        assert not shapes.seen


def test_documents_of_all_lengths_have_few_shapes(monkeypatch):
    """oneDNN keeps a megabyte for each: where widths followed lengths, 300 lengths took 573 MB.

    Four products of the indexer with tiles of 256 to 1,024 keys, six of attention with tiles of 128 to 1,024.
    """
    monkeypatch.setattr(products, "_onednn_is_wider", lambda: True)
    sizes = {"dtype": torch.float32, "heads": 1, "dim": 32, "value_dim": 16, "index_heads": 16, "index_dim": 16}
    with Shapes() as shapes:
        for length in range(300, 900, 37):
            inputs = make_inputs([length], **sizes)
            result = sparse.dsa_attention(**inputs, topk=256, softmax_scale=0.3, recall=False)
            torch.autograd.grad(result.out.sum() + result.indexer_kl, [inputs[n] for n in NAMES])
    assert 10 < len(shapes.seen) <= 4 * 4 + 6 * 8 and not shapes.gaps


@pytest.mark.parametrize("heads", [4, 24, 32, 40, 64])
def test_tiles_are_regular_whatever_the_number_of_index_heads(heads):
    rows = index_selection._chunk_rows(heads)
    tiles = list(index_selection._key_tiles(rows * heads, 4096, 4))
    assert tiles[0].start == 0 and tiles[-1].stop == 4096
    assert all(index_selection._regular(rows, heads, keys) for keys in tiles)
