"""The base in our model against transformers' own DeepseekV2ForCausalLM, and every value that breaks it."""

import pytest
import torch
from transformers import DeepseekV2ForCausalLM

from megatron_patch.model.builder import forward_pack
from tests.model.build import tiny_model
from tests.tiny import make_tiny_base

TOKENS = 48


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 320, (TOKENS,), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def hf_logits(path, tokens, dtype=torch.float32):
    model, info = DeepseekV2ForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()(tokens[None]).logits[0].float()


@torch.no_grad()
def our_logits(path, tokens, **settings):
    model, _, _ = tiny_model(path, dsa_layers=0, freeze=False, **settings)
    return forward_pack(model.eval(), tokens, torch.tensor([0, TOKENS], dtype=torch.int32)).float()


def test_fp32_logits_equal_transformers(device, tiny_base, tokens):
    expected = hf_logits(tiny_base, tokens)
    assert expected.abs().max() > 1  # logits of a size at which 2e-5 means something
    assert (our_logits(tiny_base, tokens) - expected).abs().max() <= 2e-5


def test_bf16_logits_are_within_transformers_own_rounding(device, tmp_path, tokens):
    base = make_tiny_base(tmp_path / "bf16", dtype=torch.bfloat16)
    exact, rounded = hf_logits(base, tokens), hf_logits(base, tokens, torch.bfloat16)
    own = (our_logits(base, tokens, dtype=torch.bfloat16) - exact).abs()
    theirs = (rounded - exact).abs()
    assert own.max() <= theirs.max() * 1.5 and own.mean() <= theirs.mean() * 1.2


def test_bf16_rounding_is_no_larger_than_transformers_over_bases(device, tmp_path, tokens):
    """One base says little: a single route that flips at a near-tie decides the maximum. Their mean errors, pooled over
    six bases, stay within a tenth of each other (measured 1.06)."""
    own = theirs = 0.0
    for seed in range(6):
        base = make_tiny_base(tmp_path / str(seed), dtype=torch.bfloat16, seed=seed)
        exact = hf_logits(base, tokens)
        own += (our_logits(base, tokens, dtype=torch.bfloat16) - exact).abs().mean().item()
        theirs += (hf_logits(base, tokens, torch.bfloat16) - exact).abs().mean().item()
    assert own <= theirs * 1.1


# A single wrong value in the config, and by how much logits then move at the least on this tiny base. The first two
# and pre-softmax are megatron-core's defaults: they are what one gets by leaving the key out.
WRONG = {
    "mscale_all_dim 0": (dict(mscale_all_dim=0.0), 1e-2),
    "eps 1e-5": (dict(layernorm_epsilon=1e-5), 1e-4),
    "sigmoid router": (dict(moe_router_score_function="sigmoid"), 1e-2),
    "no pre-softmax": (dict(moe_router_pre_softmax=False), 1e-2),
    "rope_type rope": (dict(rope_type="rope"), 1e-2),
    "original_max_position_embeddings 163840": (dict(original_max_position_embeddings=163840), 1e-2),
    "rotary_scaling_factor 1": (dict(rotary_scaling_factor=1.0), 1e-2),
    "routed scaling 1.5": (dict(moe_router_topk_scaling_factor=1.5), 1e-2),
    "top-k 1": (dict(moe_router_topk=1), 1e-2),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_wrong_value_shows(device, tiny_base, tokens, name):
    overrides, least = WRONG[name]
    difference = (our_logits(tiny_base, tokens, **overrides) - hf_logits(tiny_base, tokens)).abs().max()
    assert difference > least, f"{name} moved logits by {difference:.2g} only: the parity test would not see it"


@torch.no_grad()
def test_lost_latent_norm_shows(device, tiny_base, tokens):
    """What `qk_layernorm False` does in megatron-core's own specs; ours names the norm, whatever that flag says."""
    model, _, _ = tiny_model(tiny_base, dsa_layers=0, freeze=False)
    for layer in model.decoder.layers:
        layer.self_attention.kv_layernorm = torch.nn.Identity()
    logits = forward_pack(model.eval(), tokens, torch.tensor([0, TOKENS], dtype=torch.int32))
    assert (logits - hf_logits(tiny_base, tokens)).abs().max() > 1e-2


def test_packed_documents_equal_separate_ones(device, tiny_base, tokens):
    model, _, _ = tiny_model(tiny_base, dsa_layers=2, init="copy")
    cuts = torch.tensor([0, 1, 20, 31, TOKENS], dtype=torch.int32)
    with torch.no_grad():
        packed = forward_pack(model.eval(), tokens, cuts)
        for start, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            alone = forward_pack(model, tokens[start:end], torch.tensor([0, end - start], dtype=torch.int32))
            torch.testing.assert_close(packed[start:end], alone, atol=1e-5, rtol=0)
