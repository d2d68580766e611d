"""The DSA layer over MLA's latent, as the Ascend backend wants it, against the layer with keys and values of every head."""

import pytest
import torch

from megatron_patch.errors import UserError
from megatron_patch.model.builder import forward_pack
from megatron_patch.ops import npu, npu_limits
from megatron_patch.ops.backends import BACKENDS, DsaBackend
from tests.model.build import TINY_DSA, tiny_model
from tests.model.test_dsa_layer import TOKENS, T, backward
from tests.ops.npu_contract import Contract

WIDE = DsaBackend("npu", ("npu",), BACKENDS["chunked"].attention, npu.absorbed_attention)  # without the sizes' check
CUTS = torch.tensor([0, 9, 9, T], dtype=torch.int32)


@pytest.fixture
def contract(monkeypatch):
    module = Contract(wide=True)
    monkeypatch.setitem(__import__("sys").modules, "torch_npu", module)
    return module


@pytest.mark.parametrize("stage", ["dense", "sparse"])
@pytest.mark.parametrize("recompute", [False, True])
def test_trains_as_the_chunked_backend(device, tiny_base, contract, stage, recompute):
    """Losses, KL, recall and every gradient: the up-projection of keys and values gets its own through the products."""
    found = []
    dsa = type(TINY_DSA)(index_topk=8, index_n_heads=32, index_head_dim=16)  # 4 heads tie often, and ties are the op's own
    for backend in (BACKENDS["chunked"], WIDE):
        model, state, _ = tiny_model(tiny_base, init="copy", backend=backend, dsa=dsa, recompute=recompute)
        state.stage, state.counted = stage, torch.arange(T) < T - 3
        gradients = backward(model, state, CUTS)
        with torch.no_grad():
            losses = forward_pack(model, TOKENS, CUTS, TOKENS.roll(-1))
        found.append((losses, torch.tensor(state.means()), gradients))
    (ours, our_means, our_gradients), (theirs, their_means, their_gradients) = found
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    torch.testing.assert_close(our_means, their_means, atol=1e-5, rtol=1e-5)
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in their_gradients.items():
        bound = 2e-5 * max(gradient.abs().max().item(), 1.0)  # fp32, products in another order
        torch.testing.assert_close(our_gradients[name], gradient, atol=bound, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    asked = [name for name, _ in contract.calls]
    forwards = 2 * 2  # two layers; with gradients and without
    assert asked.count("indexer") == (forwards if stage == "sparse" else 0)  # a layer that runs again takes what it chose
    assert asked.count("attention") == (forwards + (2 if recompute else 0) if stage == "sparse" else 0)


def test_a_model_that_the_operators_cannot_take_is_refused_in_a_line(device, tiny_base, contract):
    with pytest.raises(UserError, match=r"--dsa-backend npu: .*take bfloat16.*latent of 512.*chunked takes every size"):
        tiny_model(tiny_base, backend=BACKENDS["npu"])
    assert npu_limits.LATENT_DIM == 512
