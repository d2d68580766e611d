"""Bypassing leaves the base; scrambling keeps causality, padding and the size of every selection."""

from functools import partial

import pytest
import torch

from megatron_patch.evaluation import ablations
from megatron_patch.evaluation.ablations import (
    bypassed,
    dsa_layers,
    fan_out,
    layer_name,
    recorded_trunk,
    replayed_trunk,
    scrambled,
)
from tests.evaluation.models import DSA


@pytest.fixture
def batch():
    """Ids and mask [3, 30], right padded to different lengths."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 320, (3, 30), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 25:] = 0
    mask[2, 10:] = 0
    return ids, mask


@torch.no_grad()
def _logits(model, ids, mask=None):
    return model(ids, attention_mask=mask, use_cache=False).logits


def test_bypassed_export_is_its_base_exactly(base_model, export_model, batch):
    ids, _ = batch
    expected = _logits(base_model, ids)
    assert not torch.allclose(_logits(export_model, ids), expected, atol=0.1)
    with bypassed(export_model):
        assert torch.equal(_logits(export_model, ids), expected)
    assert not torch.allclose(_logits(export_model, ids), expected, atol=0.1)  # and comes back afterwards


def test_zeroed_export_is_its_base_exactly(base_model, zeroed_model, batch):
    assert torch.equal(_logits(zeroed_model, batch[0]), _logits(base_model, batch[0]))


def test_bypassing_one_layer_leaves_the_other(export_model, batch):
    ids, _ = batch
    first, second = dsa_layers(export_model)
    alone = []
    for layer in (first, second):
        with bypassed(export_model, [layer]):
            alone.append(_logits(export_model, ids))
    with bypassed(export_model):
        both = _logits(export_model, ids)
    whole = _logits(export_model, ids)
    logits = [whole, both, *alone]
    assert all(not torch.allclose(a, b, atol=1e-2) for i, a in enumerate(logits) for b in logits[:i])


@pytest.fixture
def selections(export_model, batch):
    """Masks [B, S, T] that the first DSA layer used: as it is, and scrambled with seeds 0, 0 and 1."""
    attention = export_model.base_model.layers[dsa_layers(export_model)[0]].self_attn
    seen = []
    attention.selection_observer = lambda chosen: seen.append(chosen.clone())
    try:
        _logits(export_model, *batch)
        for seed in (0, 0, 1):
            with scrambled(export_model, torch.Generator().manual_seed(seed)):
                _logits(export_model, *batch)
        assert attention.index_selector is None  # restored
    finally:
        attention.selection_observer = None
    return seen


def test_scrambled_selection_is_causal_inside_the_mask_and_as_large(selections, batch):
    own, random, *_ = selections
    mask = batch[1].bool()
    rows = mask[:, :, None]  # queries that are padding do not matter
    causal = torch.ones(30, 30, dtype=torch.bool).tril()
    assert not (random & ~causal & rows).any()
    assert not (random & ~mask[:, None, :] & rows).any()
    sizes, expected = random.sum(-1), torch.arange(1, 31).clamp(max=DSA.index_topk)
    assert torch.equal(sizes[mask], expected.expand(3, -1)[mask])
    assert torch.equal(sizes[mask], own.sum(-1)[mask])


def test_scrambled_selection_is_random_and_seeded(selections):
    own, first, again, other = selections
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    late = slice(DSA.index_topk, None)  # a query with few keys selects all of them
    assert not torch.equal(own[0, late], first[0, late])
    # each of 30 keys is drawn by the last query about equally often over many seeds
    counts = torch.zeros(30)
    for seed in range(400):
        noise = torch.rand(1, 1, 30, generator=torch.Generator().manual_seed(seed))
        counts += ablations.select_topk(noise, DSA.index_topk)[0, 0]
    assert (counts / 400).sub(DSA.index_topk / 30).abs().max() < 0.1


def test_scrambling_changes_the_result_beyond_topk_only(export_model, batch):
    ids, _ = batch
    for length, same in ((DSA.index_topk, True), (30, False)):
        part = ids[:, :length]
        expected = _logits(export_model, part)
        with scrambled(export_model, torch.Generator().manual_seed(0)):
            assert torch.equal(_logits(export_model, part), expected) == same


@pytest.mark.parametrize("name", ["export_model", "base_model"])
def test_fan_out_equals_separate_passes(request, name, batch):
    """The shared lower layers must not change a bit; a base, without DSA layers, has nothing to share."""
    model = request.getfixturevalue(name)
    ids, mask = batch
    wanted = {
        "bypassed": lambda: bypassed(model),
        "scrambled": lambda: scrambled(model, torch.Generator().manual_seed(5)),
        **{layer_name(i): partial(bypassed, model, [i]) for i in dsa_layers(model)},
    }
    with torch.no_grad():
        together = fan_out(model, ids, mask, wanted)
        for key, ablation in wanted.items():
            with ablation():
                hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            assert torch.equal(together[key], hidden), key
    assert all("forward" not in layer.__dict__ for layer in model.base_model.layers)
    assert not model.base_model.layers[0]._forward_hooks


@pytest.mark.parametrize("name", ["export_model", "base_model"])
def test_a_replayed_trunk_equals_separate_passes(request, name, batch):
    """What lm-eval's later passes skip must not change a bit, batch after batch."""
    model = request.getfixturevalue(name)
    batches = [batch[0], batch[0][:2, :20]]
    with recorded_trunk(model) as trunk:
        for ids in batches:
            _logits(model, ids)
    assert len(trunk) == (2 if dsa_layers(model) else 0)

    def passes():
        with scrambled(model, torch.Generator().manual_seed(5)):
            return [_logits(model, ids) for ids in batches]

    expected = passes()
    with replayed_trunk(model, trunk):
        assert all(torch.equal(a, b) for a, b in zip(passes(), expected, strict=True))
    assert all("forward" not in layer.__dict__ for layer in model.base_model.layers)


def test_a_replayed_trunk_needs_the_same_batches(export_model, batch):
    with recorded_trunk(export_model) as trunk:
        _logits(export_model, batch[0])
    with pytest.raises(AssertionError, match="another batch"), replayed_trunk(export_model, trunk):
        _logits(export_model, batch[0][:, :20])
    with pytest.raises(AssertionError, match="fewer batches"), replayed_trunk(export_model, trunk):
        pass


def test_an_error_inside_leaves_the_model_as_it_was(export_model, batch):
    expected = _logits(export_model, batch[0])
    for ablation in (bypassed(export_model), scrambled(export_model, torch.Generator())):
        with pytest.raises(RuntimeError, match="inside"), ablation:
            raise RuntimeError("inside")
    assert torch.equal(_logits(export_model, batch[0]), expected)
