"""The compiled sampled product against plain sums, and what is left to PyTorch."""

import sys

import pytest
import torch

from megatron_patch.ops import compiled

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def inputs(slots=7, width=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(slots)
    left, right = (torch.randn(n, width, generator=generator, dtype=dtype) for n in (3, 20))
    chosen = torch.randint(0, 20, (3, slots), generator=generator, dtype=torch.int32)
    return left, right, chosen, torch.full((3, slots), NAN, dtype=dtype)


@pytest.mark.parametrize("slots", [1, 3, 4, 7, 64])
@pytest.mark.parametrize("width", [1, 5, 16, 192])
def test_equals_plain_sums(slots, width):
    left, right, chosen, into = inputs(slots, width)
    assert compiled.sampled_product(left, right, chosen, into)
    expected = (left[:, None] * right[chosen.long()]).sum(-1)
    torch.testing.assert_close(into, expected, rtol=1e-5, atol=1e-5)


def test_nan_and_infinity_stay():
    left, right, chosen, into = inputs(4)
    left[0, 2], left[1, 0], right[:, 0] = NAN, INF, 1.0
    left[1, 1], right[:, 1] = -INF, 1.0
    assert compiled.sampled_product(left, right, chosen, into)
    assert into[:2].isnan().all() and into[2].isfinite().all()  # inf - inf is NaN


def test_pytorch_has_the_rest(monkeypatch):
    """Other precisions, several threads, no numba, which is said: nothing is written."""
    cases = [inputs(dtype=torch.float64), inputs()]
    assert not compiled.sampled_product(*cases[0])
    torch.set_num_threads(2)
    assert not compiled.sampled_product(*cases[1])
    torch.set_num_threads(1)
    compiled._dots.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.warns(RuntimeWarning, match=r"numba does not load .* take twice the time; pip install numba"):
        assert not compiled.sampled_product(*cases[1])
    compiled._dots.cache_clear()
    assert all(into.isnan().all() for *_, into in cases)
