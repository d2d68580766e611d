"""A model with masked routers against one whose experts were cut out by hand."""

import pytest
import torch

from megatron_patch.errors import UserError
from megatron_patch.pruning.hooks import moe_blocks
from megatron_patch.pruning.masked import masked, route_softmax
from tests.pruning.models import EXPERTS, FAMILIES, TOP_K, pruned_by_hand, small_model, token_rows

IDS = torch.tensor(token_rows(24, 24))
KEPT = {1: [0, 2, 5, 7], 2: [1, 3, 4, 6]}  # two of each group of four


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def survivors(model, kept):
    """A table of distinct kept experts, in old ids and in new ones."""
    old = torch.stack([torch.tensor(kept)[torch.randperm(len(kept))[:TOP_K]] for _ in range(model.config.vocab_size)])
    return old, torch.searchsorted(torch.tensor(kept), old)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deepseek_v4"])
def test_equals_the_pruned_model(family):
    model = small_model(family)
    small, whole = logits(pruned_by_hand(model, KEPT)), logits(model)
    with masked(model, KEPT):
        torch.testing.assert_close(logits(model), small, rtol=0, atol=1e-5)
    assert not torch.allclose(whole, small, atol=1e-2), "pruning must matter here"
    assert torch.equal(logits(model), whole), "the mask must be gone after the block"


def test_equals_the_pruned_model_with_group_limited_softmax():
    model = small_model("deepseek_v2", topk_method="group_limited_greedy", n_group=2, topk_group=1)
    with masked(model, KEPT):
        torch.testing.assert_close(logits(model), logits(pruned_by_hand(model, KEPT)), rtol=0, atol=1e-5)


def test_equals_the_pruned_model_with_hash_routing():
    model = small_model("deepseek_v4")
    kept = {0: [0, 3, 4, 6], **KEPT}
    old, new = survivors(model, kept[0])
    small = logits(pruned_by_hand(model, kept, {0: new}))
    with masked(model, kept, {0: old}):
        torch.testing.assert_close(logits(model), small, rtol=0, atol=1e-5)


def test_a_large_negative_bias_is_no_mask():
    """All sigmoid choices far below 0: a dropped expert set to 0 would win; -inf loses."""
    model = small_model("deepseek_v3")
    for block in moe_blocks(model).values():
        block.gate.e_score_correction_bias.sub_(12.0)
    with masked(model, KEPT):
        torch.testing.assert_close(logits(model), logits(pruned_by_hand(model, KEPT)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
@torch.no_grad()
def test_our_softmax_router_is_transformers_when_nothing_is_dropped(method):
    gate = moe_blocks(small_model("deepseek_v2", topk_method=method, n_group=2, topk_group=1))[1].gate
    x = torch.randn(50, 32)
    for ours, theirs in zip(route_softmax(gate, x, torch.zeros(EXPERTS, dtype=torch.bool)), gate(x), strict=True):
        assert torch.equal(ours, theirs)


def test_an_exception_inside_leaves_the_model_whole():
    model = small_model("deepseek_v3")
    whole = logits(model)
    with pytest.raises(RuntimeError), masked(model, KEPT):
        raise RuntimeError
    assert torch.equal(logits(model), whole)


@pytest.mark.parametrize(
    ("family", "kept", "message"),
    [
        ("deepseek_v2", {0: [0, 1]}, "layer 0 is none; there are 1, 2"),
        ("deepseek_v2", {1: [0, 8]}, "from 0 to 7: layer 1 keeps 8"),
        ("deepseek_v2", {1: [0, 0]}, "layer 1 keeps 0 twice"),
        ("deepseek_v2", {1: [3]}, r"top-k = 2 kept experts: in layer 1 it may reach 1"),
        ("deepseek_v3", {1: [0, 1, 2, 3, 4]}, r"top-k = 2 kept experts: in layer 1 it may reach 1"),  # 4 + 1 in 2 groups
        ("deepseek_v4", {0: [0, 1, 2, 3]}, "layer 0 names dropped ones"),
    ],
)
def test_refuses_what_cannot_route(family, kept, message):
    with pytest.raises(UserError, match=message), masked(small_model(family), kept):
        pass
