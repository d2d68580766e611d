"""Generation with a cache must give the tokens of full forward passes, whatever the kind of cache and padding."""

import pytest
import torch

from tests.hf_model.hybrid import SETTINGS, tokens

TOPK = SETTINGS.index_topk
NEW = 12


def greedy_without_cache(model, ids: torch.Tensor) -> list[int]:
    """Appended tokens, each from a full forward pass over one unpadded sequence."""
    for _ in range(NEW):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0, -NEW:].tolist()


@pytest.fixture
def settings():
    return {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
def test_greedy_equals_full_forwards(export_dir, load, settings, attention, cache):
    """The prompt is shorter than k and the answer crosses it; the second prompt starts beyond it."""
    model = load(export_dir, attn_implementation=attention)
    kind = {"use_cache": False} if cache == "none" else {"cache_implementation": cache}
    for length in (TOPK - 3, 3 * TOPK):
        ids = tokens(1, length, seed=length)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **kind)
        assert out[0, length:].tolist() == greedy_without_cache(model, ids)


@pytest.mark.parametrize("tied", ["all", "some"])
def test_greedy_with_tied_scores(export_dir, load, settings, tied):
    """A trained indexer's ReLU makes ties; the newest key wins them, with a cache and without, padded or not."""
    model = load(export_dir)
    for i in model.config.dsa_layers:
        indexer = model.model.layers[i].self_attn.indexer
        if tied == "all":
            torch.nn.init.zeros_(indexer.weights_proj.weight)
        else:  # scores on a coarse grid: a tie at the boundary of nearly every row
            scores = indexer.scores
            indexer.scores = lambda *args, scores=scores: (scores(*args) * 4).round()
    ids = tokens(1, 2 * TOPK, seed=3)
    expected = greedy_without_cache(model, ids)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert out[0, 2 * TOPK :].tolist() == expected
    padded = torch.nn.functional.pad(ids, (7, 0), value=2)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (7, 0))
    assert model.generate(padded, attention_mask=mask, **settings)[0, 2 * TOPK + 7 :].tolist() == expected


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_left_padded_batch_equals_each_prompt_alone(export_dir, load, settings, attention):
    """As RL and evaluation generate: different lengths, padded on the left."""
    model = load(export_dir, attn_implementation=attention)
    prompts = [tokens(1, n, seed=n) for n in (5, 12, 30)]
    width = max(p.shape[1] for p in prompts)
    ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0), value=2) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (width - p.shape[1], 0)) for p in prompts])
    out = model.generate(ids, attention_mask=mask, **settings)
    for row, prompt in zip(out, prompts, strict=True):
        assert row[width:].tolist() == greedy_without_cache(model, prompt)


def test_logits_with_a_cache_in_chunks(model):
    """Prefill in three pieces and then token by token: logits of every position, not only the arg-max."""
    ids = tokens(2, 40)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache, parts = None, []
        for part in ids.split([5, 14, 1, 17, 1, 1, 1], 1):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    assert (torch.cat(parts, 1) - whole).abs().max() < 2e-5


def test_beams_and_sampling_run(model, settings):
    """Beam search reorders the cache in place; equal beams mean the reordering reached the DSA layers."""
    ids = tokens(1, 20)
    cached = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, num_beams=3)
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, num_beams=3, use_cache=False)
    assert torch.equal(cached, plain)
    torch.manual_seed(0)
    sampled = model.generate(
        ids, attention_mask=torch.ones_like(ids), **settings | {"do_sample": True}, num_return_sequences=3
    )
    assert sampled.shape == (3, 20 + NEW)
