"""The DSA layer inside our model: gradients, stages, documents, and an independent implementation of it."""

import pytest
import torch
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding

from megatron_patch.checkpoint.hf_mapping import hybrid_mapping
from megatron_patch.model.architecture import DsaSettings, read_architecture
from megatron_patch.model.builder import forward_pack, packed_seq_params
from megatron_patch.ops import chunked
from tests.model.build import TINY_DSA, tiny_model
from tests.tiny import CONFIG

T = 40
TOKENS = torch.randint(0, 320, (T,), generator=torch.Generator().manual_seed(7))
ONE = torch.tensor([0, T], dtype=torch.int32)
INDEXER = "self_attention.indexer."


def backward(model, state, cuts=ONE, scale=1.0):
    model.train()
    model.zero_grad()
    state.kl_grad_scale = scale
    forward_pack(model, TOKENS, cuts, TOKENS.roll(-1)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def test_layer_equals_transformers_deepseek_v32(device, tiny_base):
    """An independent implementation of attention and indexer with the same weights, more tokens than index_topk."""
    # 32 index heads: with 4, a sixteenth of the scores are exact zeros, and torch.topk orders ties arbitrarily there.
    dsa = DsaSettings(index_topk=8, index_n_heads=32, index_head_dim=16)
    model, state, pattern = tiny_model(tiny_base, init="copy", dsa=dsa)
    attention = model.decoder.layers[3].self_attention
    names = {name: p for name, p in model.named_parameters() if name.startswith("decoder.layers.3.self_attention.")}
    mapping = hybrid_mapping(read_architecture(tiny_base), pattern)
    weights = {}
    for name, parameter in names.items():
        for hf, tensor in mapping.to_hf(name, parameter.detach()).items():
            weights[hf.removeprefix("model.layers.3.self_attn.")] = tensor
    keys = ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    rope = {**CONFIG["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000.0}
    config = DeepseekV32Config(
        **{key: CONFIG[key] for key in keys},
        num_key_value_heads=CONFIG["num_attention_heads"],
        num_hidden_layers=4,
        q_lora_rank=CONFIG["hidden_size"],
        index_topk=dsa.index_topk,
        index_n_heads=dsa.index_n_heads,
        index_head_dim=dsa.index_head_dim,
        rope_parameters=rope,
        max_position_embeddings=163840,
        rms_norm_eps=1e-6,
        attention_bias=False,
        attn_implementation="eager",
    )
    theirs = DeepseekV32Attention(config, 0).eval()
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and not missing
    hidden = torch.randn(T, 1, CONFIG["hidden_size"], generator=torch.Generator().manual_seed(8))
    rotary = DeepseekV32RotaryEmbedding(config)
    batch = hidden.transpose(0, 1)
    mask = torch.full((T, T), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        expected = theirs(batch, position_embeddings=rotary(batch, torch.arange(T)[None]), attention_mask=mask)[0][0]
        ours, _ = attention.eval()(hidden, None, packed_seq_params=packed_seq_params(ONE))
        state.stage = "dense"
        dense, _ = attention(hidden, None, packed_seq_params=packed_seq_params(ONE))
    assert (ours[:, 0] - expected).abs().max() <= 1e-5
    assert (dense[:, 0] - expected).abs().max() > 1e-2  # the selection matters at this length


def test_indexer_learns_from_the_kl_alone_and_the_model_from_the_lm_loss_alone(device, tiny_base):
    model, state, _ = tiny_model(tiny_base, init="copy")
    with_kl, without = backward(model, state, scale=1.0), backward(model, state, scale=0.0)
    for name in with_kl:
        if INDEXER in name:
            assert with_kl[name].abs().max() > 0, name
            # Coefficient 0: a gradient of zeros, not an absent one (Megatron-LM issue 5643).
            assert without[name] is not None and without[name].abs().max() == 0, name
        else:
            assert torch.equal(with_kl[name], without[name]), name


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_kl_gradient_is_proportional_to_its_scale(device, tiny_base, stage):
    model, state, _ = tiny_model(tiny_base, init="copy")
    state.stage = stage
    once, thrice = backward(model, state, scale=1.0), backward(model, state, scale=3.0)
    for name in once:
        if INDEXER in name:
            torch.testing.assert_close(thrice[name], 3 * once[name])


@pytest.mark.parametrize("stage", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_train_alike(device, tiny_base, stage, dtype, monkeypatch):
    """Losses, KL, recall and every gradient with the chunked op, several chunks a document, as with the reference."""
    monkeypatch.setattr(chunked, "chunk_rows", lambda *sizes: 7)
    cuts = torch.tensor([0, 9, 9, T], dtype=torch.int32)
    found = []
    for backend in ("chunked", "reference"):
        model, state, _ = tiny_model(tiny_base, init="copy", dtype=dtype, backend=backend)
        state.stage, state.counted = stage, torch.arange(T) < T - 3
        gradients = backward(model, state, cuts)
        with torch.no_grad():
            losses = forward_pack(model, TOKENS, cuts, TOKENS.roll(-1))
        found.append((losses, torch.tensor(state.means()), gradients))
    (losses, means, gradients), (their_losses, their_means, their_gradients) = found
    # The ops differ by fp32 rounding. In bf16 that moves a few elements across a rounding boundary, by 2**-8 of their
    # value, and what follows with them.
    tolerance = 1e-5 if dtype == torch.float32 else 2**-5
    torch.testing.assert_close(losses, their_losses, rtol=tolerance, atol=0)
    torch.testing.assert_close(means, their_means, rtol=tolerance, atol=0)
    assert gradients.keys() == their_gradients.keys()
    for name, theirs in their_gradients.items():
        assert (gradients[name] is None) == (theirs is None), name  # an expert that no token was routed to
        if theirs is not None:
            atol = tolerance * theirs.abs().max().item()
            torch.testing.assert_close(gradients[name], theirs, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def test_zero_indexer_is_a_sliding_window_in_every_forward(device, tiny_base):
    """All scores tie: grad and no-grad forward, alone or behind another document, take the newest keys."""
    model, state, _ = tiny_model(tiny_base, init="copy")
    seen = []
    for layer in model.decoder.layers[3:]:
        with torch.no_grad():
            layer.self_attention.indexer.weights_proj.weight.zero_()
        inner = layer.self_attention.backend.attention
        recorded = type(layer.self_attention.backend)(
            "recorded", ("cpu",), lambda *a, inner=inner, **k: seen.append(inner(*a, **k)) or seen[-1]
        )
        layer.self_attention.backend = recorded
    backward(model, state)
    with torch.no_grad():
        forward_pack(model.eval(), TOKENS, ONE)
        forward_pack(model, torch.cat([TOKENS[:5], TOKENS]), torch.tensor([0, 5, T + 5], dtype=torch.int32))
    window = [sorted(range(max(0, t - TINY_DSA.index_topk + 1), t + 1)) for t in range(T)]
    assert len(seen) == 6
    for number, result in enumerate(seen):
        offset = 5 if number >= 4 else 0
        rows = result.indices[offset:].tolist()
        assert [[i - offset for i in row if i >= 0] for row in rows] == window


def test_changing_one_document_leaves_the_other_alone(device, tiny_base):
    model, _state, _ = tiny_model(tiny_base, init="copy")
    cuts = torch.tensor([0, 18, T], dtype=torch.int32)
    changed = TOKENS.clone()
    changed[:18] = changed[:18].flip(0)
    with torch.no_grad():
        a, b = (forward_pack(model.eval(), tokens, cuts) for tokens in (TOKENS, changed))
    # Not bit-equal: experts multiply the tokens of all documents at once, and a GEMM's rounding depends on its shape.
    torch.testing.assert_close(a[18:], b[18:], atol=1e-5, rtol=0)
    assert (a[:18] - b[:18]).abs().max() > 1e-2


def test_aux_loss_moves_new_routers_only(device, tiny_base):
    model, state, _ = tiny_model(tiny_base, init="copy", aux_loss_coeff=0.1)
    assert [layer.mlp.router.config.moe_aux_loss_coeff for layer in model.decoder.layers[1:]] == [0.0, 0.0, 0.1, 0.1]
    with_loss = backward(model, state)
    plain, plain_state, _ = tiny_model(tiny_base, init="copy")
    without = backward(plain, plain_state)
    router = "decoder.layers.4.mlp.router.weight"
    assert not torch.allclose(with_loss[router], without[router], atol=1e-6)
