"""What the hybrid computes: the base's logits, the reference op's attention, an independent DSA layer's."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding

from megatron_patch.hf_model.modeling_deepseek_v2_dsa import select_topk
from megatron_patch.model.architecture import DsaSettings, read_architecture
from megatron_patch.ops import reference
from tests.hf_model.hybrid import SETTINGS, make_tiny_export, tokens
from tests.ops.inputs import as_sets
from tests.ops.layer import dsa_layer
from tests.tiny import make_tiny_base

TOPK = SETTINGS.index_topk


def observe(model) -> dict[int, torch.Tensor]:
    """Filled by the next forward pass: layer number -> bool [B, S, T]."""
    seen = {}
    for i in model.config.dsa_layers:
        model.model.layers[i].self_attn.selection_observer = lambda mask, i=i: seen.__setitem__(i, mask)
    return seen


def layer_io(model, layer: int, ids: torch.Tensor, **options):
    """(input, output) of one layer's attention in a forward pass of the whole model."""
    seen = []
    hook = model.model.layers[layer].self_attn.register_forward_hook(
        lambda module, args, kwargs, output: seen.append((kwargs["hidden_states"], output[0])), with_kwargs=True
    )
    with torch.no_grad():
        model(ids, **options)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identity_layers_give_the_bases_logits_exactly(tmp_path, load, attention, dtype):
    """New layers whose out-projections are zero pass their input on: difference 0.0, at 5 times as many tokens as k."""
    base_dir = make_tiny_base(tmp_path / "base", dtype=dtype)
    path = make_tiny_export(tmp_path / "hybrid", base_dir, identity=True, dtype=dtype)
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=dtype, attn_implementation=attention).eval()
    ids = tokens(2, 5 * TOPK)
    with torch.no_grad():
        logits = load(path, dtype=dtype, attn_implementation=attention)(ids).logits
        assert logits.dtype == dtype and (logits - base(ids).logits).abs().max() == 0.0


def test_softmax_scale_is_right_in_every_layer(model, base_dir):
    """YaRN's factor is missing from `deepseek_v2` before 5.16, in the base layers too: 0.1021 instead of 0.1622."""
    expected = read_architecture(base_dir).softmax_scale
    assert [layer.self_attn.scaling for layer in model.model.layers] == [pytest.approx(expected, rel=1e-12)] * 5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_equals_the_reference_op(export_dir, load, attention):
    """Output and selected keys of both DSA layers, for hidden states as they occur in the model."""
    model, n = load(export_dir, attn_implementation=attention), 6 * TOPK
    chosen = observe(model)
    for i in model.config.dsa_layers:
        x, out = layer_io(model, i, tokens(1, n))
        weights = {name: p.detach() for name, p in model.model.layers[i].self_attn.named_parameters()}
        expected, result, _ = dsa_layer(
            weights, x[0], torch.tensor([0, n], dtype=torch.int32), heads=4, topk=TOPK,
            rope_parameters=model.config.rope_parameters,
        )  # fmt: skip
        assert [row.nonzero().flatten().tolist() for row in chosen[i][0]] == as_sets(result.indices)
        assert (out[0] - expected).abs().max() <= 1e-5


def test_attention_equals_deepseek_v32(base_dir, tmp_path, load):
    """The same weights in transformers' own DSA attention. 32 index heads: no exact ties, which it breaks at random."""
    settings = DsaSettings(index_topk=TOPK, index_n_heads=32, index_head_dim=16)
    model, n = load(make_tiny_export(tmp_path / "hybrid", base_dir, settings=settings)), 6 * TOPK
    c = model.config
    config = DeepseekV32Config(
        hidden_size=c.hidden_size, num_attention_heads=4, num_key_value_heads=4, qk_nope_head_dim=c.qk_nope_head_dim,
        qk_rope_head_dim=c.qk_rope_head_dim, v_head_dim=c.v_head_dim, kv_lora_rank=c.kv_lora_rank,
        q_lora_rank=c.hidden_size, index_topk=TOPK, index_head_dim=16, index_n_heads=32,
        rope_parameters=dict(c.rope_parameters), attn_implementation="eager",
    )  # fmt: skip
    theirs = DeepseekV32Attention(config, 3)
    theirs.load_state_dict(model.model.layers[3].self_attn.state_dict())
    chosen = observe(model)
    x, out = layer_io(model, 3, tokens(1, n))
    indices = []
    theirs.indexer.register_forward_hook(lambda module, args, output: indices.append(output[0]))
    mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        expected, _ = theirs(x, DeepseekV32RotaryEmbedding(config)(x, torch.arange(n)[None]), mask)
    their_mask = torch.zeros(n, n, dtype=torch.bool).scatter(1, indices[0].long(), True).tril()
    assert torch.equal(chosen[3][0], their_mask)
    assert (out - expected).abs().max() <= 1e-5


def test_selection_matters_and_only_beyond_topk(model):
    """Up to k tokens every key is chosen; beyond, the choice changes the logits: else nothing above tested it."""
    seen, ids = observe(model), tokens(1, 4 * TOPK)
    with torch.no_grad():
        sparse = model(ids).logits
        assert all(torch.equal(m[0].sum(-1), torch.arange(1, 4 * TOPK + 1).clamp(max=TOPK)) for m in seen.values())
        assert not any(m[0].triu(1).any() for m in seen.values())
        for i in model.config.dsa_layers:
            model.model.layers[i].self_attn.topk = 10**6
        dense = model(ids).logits
    assert (sparse - dense)[:, :TOPK].abs().max() < 1e-5
    assert (sparse - dense)[:, TOPK:].abs().max() > 1e-2


def test_select_topk_is_the_reference_selection():
    """Two implementations of one rule, on scores full of ties and of masked keys."""
    g = torch.Generator().manual_seed(0)
    for k in (1, 5, 12):
        scores = torch.randint(-2, 3, (3, 40, 12), generator=g).float() * 0.5
        scores[torch.rand(scores.shape, generator=g) < 0.3] = float("-inf")
        mask = select_topk(scores, k)
        for b in range(3):
            assert [row.nonzero().flatten().tolist() for row in mask[b]] == as_sets(reference.select_topk(scores[b], k))


def test_selector_is_used_and_held_to_the_mask(model):
    """Evaluation scrambles the selection through it; whatever it answers, no future key gets in."""
    ids, calls = tokens(1, 3 * TOPK), []
    with torch.no_grad():
        own = model(ids).logits

        def newest(scores, k):
            calls.append((scores.dtype, torch.isneginf(scores[0]).sum().item(), k))
            t = torch.arange(scores.shape[-1])
            return (t[None] > t[:, None] - k).expand(scores.shape)  # the future included

        for i in model.config.dsa_layers:
            model.model.layers[i].self_attn.index_selector = newest
        seen = observe(model)
        other = model(ids).logits
    n = 3 * TOPK
    assert calls == [(torch.float32, n * (n - 1) // 2, TOPK)] * 2
    window = torch.ones(n, n, dtype=torch.bool).tril() & torch.ones(n, n, dtype=torch.bool).triu(1 - TOPK)
    assert all(torch.equal(mask[0], window) for mask in seen.values())
    assert (own - other).abs().max() > 1e-2


def test_selector_that_chooses_nothing_is_refused(model):
    """An empty row would become uniform attention over all tokens, the future included."""
    model.model.layers[3].self_attn.index_selector = lambda scores, k: torch.zeros_like(scores, dtype=torch.bool)
    with pytest.raises(ValueError, match="at least one allowed key"), torch.no_grad():
        model(tokens(1, 3 * TOPK))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_on_either_side_changes_nothing(export_dir, load, attention):
    """A batch of two lengths: each row as if alone, and the padded positions finite."""
    model, n, pad = load(export_dir, attn_implementation=attention), 3 * TOPK, 7
    ids = tokens(1, n)
    with torch.no_grad():
        alone = model(ids).logits[0]
        for left in (True, False):
            blank = torch.full((1, pad), 2)
            row = torch.cat([blank, ids] if left else [ids, blank], 1)
            mask = torch.ones(2, n + pad, dtype=torch.long)
            mask[0, :pad] = 0 if left else 1
            mask[0, n:] = mask[0, n:] if left else 0
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            batch = torch.cat([row, tokens(1, n + pad, seed=1)])
            logits = model(batch, attention_mask=mask, position_ids=positions).logits
            real = logits[0, pad:] if left else logits[0, :n]
            assert logits.isfinite().all()
            assert (real - alone).abs().max() < 2e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_do_not_see_each_other(export_dir, load, attention):
    """Position ids that restart mean separate documents (padding-free training): selection included."""
    model, lengths = load(export_dir, attn_implementation=attention), (20, 30)
    ids = tokens(1, 50)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    seen = observe(model)
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits[0]
        masks = dict(seen)
        alone = torch.cat([model(part).logits[0] for part in ids.split(lengths, 1)])
    assert not any(mask[0, 20:, :20].any() for mask in masks.values())
    assert (packed - alone).abs().max() < 2e-5


def test_attention_weights_are_zero_outside_the_selection(export_dir, load):
    model, ids = load(export_dir, attn_implementation="eager"), tokens(1, 3 * TOPK)
    seen = observe(model)
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    for i in model.config.dsa_layers:
        outside = ~seen[i][0].expand(4, -1, -1)
        assert not weights[i][0][outside].any() and weights[i][0][~outside].all()


def test_training_reaches_all_but_the_indexer(model):
    """RL trains the model and not the choice; with recomputation (gradient checkpointing) the gradients are equal."""
    ids = tokens(2, 3 * TOPK)
    model(ids, labels=ids, use_cache=False).loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    without = {n for n, g in gradients.items() if g is None}
    assert without == {n for n in gradients if ".indexer." in n}
    model.zero_grad()
    model.train()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        if name not in without:
            assert torch.equal(parameter.grad, gradients[name]), name


def test_scores_stay_in_fp32_under_autocast(base_dir, tmp_path, load):
    """bf16 scores would tie by the dozen; autocast must not lower them. One head: a score is a single product."""
    settings = DsaSettings(index_topk=TOPK, index_n_heads=1, index_head_dim=16)
    model, seen = load(make_tiny_export(tmp_path / "hybrid", base_dir, settings=settings)), []
    model.model.layers[3].self_attn.index_selector = lambda s, k: seen.append(s) or select_topk(s, k)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens(1, 3 * TOPK))
    scores = seen[0][torch.isfinite(seen[0]) & (seen[0] != 0)]
    assert scores.dtype == torch.float32 and (scores != scores.bfloat16().float()).float().mean() > 0.9


def test_attention_kind_can_be_changed_afterwards(model):
    """Trainers call set_attn_implementation(); the DSA layers must follow, as the stock layers do."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(tokens(1, 3 * TOPK), output_attentions=True).attentions
    assert [w.shape for w in weights] == [(1, 4, 3 * TOPK, 3 * TOPK)] * 5
