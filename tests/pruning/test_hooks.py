"""Observed routing against a direct recount from the routers' outputs, for each family."""

import pytest
import torch

from megatron_patch.errors import UserError
from megatron_patch.pruning.hooks import ExpertObserver, moe_blocks
from megatron_patch.pruning.moe_layers import MoeLayers
from megatron_patch.pruning.observe import observe_batch
from tests.pruning.models import EXPERTS, FAMILIES, TOP_K, small_model, token_rows


def layers_of(model) -> MoeLayers:
    return MoeLayers(model.config.model_type, 3, tuple(moe_blocks(model)), EXPERTS, TOP_K)


def observed(model, rows):
    observer = ExpertObserver(model, layers_of(model))
    observe_batch(model, observer, rows)
    return observer.statistics


@torch.no_grad()
def recount(model, rows):
    """Row by row without padding: count, gate sum, gate*norm sum, its square and maximum, with a plain loop."""
    seen = []  # (layer row, hidden, index, weight)
    hooks = []
    for row, block in enumerate(moe_blocks(model).values()):
        hook = lambda _m, args, row=row: seen.append((row, *args))  # noqa: E731
        hooks.append(block.experts.register_forward_pre_hook(hook))
    for ids in rows:
        model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    blocks = list(moe_blocks(model).values())
    sums = torch.zeros(5, len(blocks), EXPERTS, dtype=torch.float64)
    for row, hidden, index, weight in seen:
        experts = blocks[row].experts
        for t in range(len(hidden)):
            for expert, gate in zip(index[t].tolist(), weight[t].tolist()):
                up = experts.gate_up_proj[expert] @ hidden[t]
                if hasattr(experts, "_apply_gate"):
                    value = experts._apply_gate(up)
                else:
                    value = experts.act_fn(up.chunk(2)[0]) * up.chunk(2)[1]
                norm = gate * float((experts.down_proj[expert] @ value).norm())
                sums[:4, row, expert] += torch.tensor([1.0, gate, norm, norm**2], dtype=torch.float64)
                sums[4, row, expert] = max(float(sums[4, row, expert]), norm)
    return sums


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_a_direct_recount_and_padding_is_not_counted(family):
    model, rows = small_model(family), token_rows(19, 7, 12)
    got, expected = observed(model, rows), recount(model, rows)
    assert got.tokens == 38
    assert torch.equal(got.count, expected[0].long())
    assert bool((got.count.sum(1) == 38 * TOP_K).all())
    for field, value in zip(("gate_sum", "gate_norm_sum", "gate_norm_square", "gate_norm_max"), expected[1:]):
        torch.testing.assert_close(getattr(got, field), value, rtol=1e-4, atol=1e-6)


def test_padding_of_any_length_changes_nothing():
    """Next to a long row the short one is mostly padding, which routes somewhere as well."""
    model = small_model("deepseek_v2")
    long, short = token_rows(40, 3)
    alone = observed(model, [long]).count + observed(model, [short]).count
    assert torch.equal(observed(model, [long, short]).count, alone)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_observed_model_computes_the_same_bits(family):
    model, ids = small_model(family), torch.tensor(token_rows(11))
    before = model(input_ids=ids, use_cache=False).logits
    observer = ExpertObserver(model, layers_of(model))
    observer.real = torch.ones(11, dtype=torch.bool)
    with observer:
        during = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(before, during)
    assert all("forward" not in block.experts.__dict__ for block in moe_blocks(model).values())


def test_the_observed_model_computes_the_same_bits_in_bf16():
    model, ids = small_model("deepseek_v3").bfloat16(), torch.tensor(token_rows(11))
    observer = ExpertObserver(model, layers_of(model))
    observer.real = torch.ones(11, dtype=torch.bool)
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        with observer:
            assert torch.equal(before, model(input_ids=ids, use_cache=False).logits)


def test_other_moe_layers_than_the_config_says_are_refused():
    model = small_model("deepseek_v2")
    with pytest.raises(UserError, match=r"MoE layers must be those of config.json: it says \(0, 1, 2\), the model has \(1, 2\)"):
        ExpertObserver(model, MoeLayers("deepseek_v2", 3, (0, 1, 2), EXPERTS, TOP_K))
