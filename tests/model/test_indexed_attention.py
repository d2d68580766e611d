"""Indexers beside the base's layers: the base computes what it did, and the indexers learn what the native layout runs."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_patch.checkpoint.hf_mapping import hybrid_mapping
from megatron_patch.checkpoint.load_base import load_base
from megatron_patch.errors import UserError
from megatron_patch.model.architecture import read_architecture
from megatron_patch.model.builder import BuildSettings, build_model, forward_pack
from megatron_patch.model.freeze import freeze_all_but_indexers
from megatron_patch.model.indexed_attention import query_latent
from megatron_patch.model.initialize import initialize_base_indexers
from megatron_patch.ops.backends import choose_backend
from tests.model.build import TINY_DSA, tiny_model

LENGTHS = [30, 1, 41]
CU = torch.tensor([0, 30, 31, 72], dtype=torch.int32)
TOKENS = torch.randint(3, 320, (72,), generator=torch.Generator().manual_seed(4))


def indexed_model(base, *, dtype=torch.float32, backend="auto", std=0.1):
    """(model, state): the base with an indexer beside each layer, all else frozen."""
    arch = read_architecture(base)
    pattern = ("mla",) * arch.num_layers
    build = BuildSettings(dtype=dtype, base_indexers=True)
    model, state = build_model(arch, pattern, TINY_DSA, build, choose_backend(backend, "cpu"))
    load_base(model, base, arch, pattern, progress=False)
    initialize_base_indexers(model, std=std, seed=3)
    freeze_all_but_indexers(model)
    return model, state


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_the_bases_bit_for_bit(device, tiny_base, dtype):
    plain, _, _ = tiny_model(tiny_base, dsa_layers=1, dtype=dtype)
    plain.decoder.layers = plain.decoder.layers[:3]
    model, _ = indexed_model(tiny_base, dtype=dtype)
    assert torch.equal(forward_pack(model.eval(), TOKENS, CU), forward_pack(plain.eval(), TOKENS, CU))


def test_only_indexers_train(device, tiny_base):
    model, _ = indexed_model(tiny_base)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(names) == 3 * 5 and all(".self_attention.indexer." in name for name in names)
    rest = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert rest == set(hybrid_mapping(read_architecture(tiny_base), ("mla",) * 3).entries)


def _kl_gradients(base, backend: str):
    model, state = indexed_model(base, backend=backend)
    state.stage, state.kl_grad_scale = "dense", 0.5
    losses = state.attach_kept(forward_pack(model.train(), TOKENS, CU, TOKENS))
    assert not state.kept
    (losses.sum() * 3.0).backward()  # the LM loss reaches nothing, and its factor does not matter
    return state, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, model


def test_gradients_are_those_of_the_mean_kl(device, tiny_base):
    """Against autograd through a dense KL that is written down here, per layer, from transformers' own attention."""
    state, grads, model = _kl_gradients(tiny_base, "chunked")
    assert set(grads) == {name for name, p in model.named_parameters() if p.requires_grad}
    stock = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32, attn_implementation="eager").eval()
    expected_kl = dict.fromkeys(range(3), 0.0)
    expected = {name: torch.zeros_like(grad) for name, grad in grads.items()}
    for begin, end in ((0, 30), (30, 31), (31, 72)):
        normed = {}
        hooks = [
            layer.input_layernorm.register_forward_hook(lambda _m, _i, out, i=i, normed=normed: normed.update({i: out[0]}))
            for i, layer in enumerate(stock.model.layers)
        ]
        with torch.no_grad():
            attentions = stock(TOKENS[None, begin:end], output_attentions=True).attentions
        for hook in hooks:
            hook.remove()
        for i, layer in enumerate(stock.model.layers):
            target = attentions[i][0].mean(0)
            scores = _scores(model.decoder.layers[i].self_attention.indexer, normed[i], layer, stock, end - begin)
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
            kl = (torch.special.xlogy(target, target) - torch.special.xlogy(target, scores.softmax(-1).clamp_min(1e-30))).sum()
            expected_kl[i] += float(kl.detach())
            prefix = f"decoder.layers.{i}.self_attention.indexer."
            named = {name: p for name, p in model.named_parameters() if name.startswith(prefix)}
            for name, grad in zip(named, torch.autograd.grad(kl * 0.5, list(named.values())), strict=True):
                expected[name] += grad
    for i in range(3):
        assert float(state.kl_sum[i]) == pytest.approx(expected_kl[i], rel=1e-4)
    for name, grad in grads.items():
        scale = expected[name].abs().max()
        assert scale > 0 and (grad - expected[name]).abs().max() <= 1e-4 * scale, name


def _scores(indexer, x, layer, stock, n: int) -> torch.Tensor:
    """Equation (1) written out with the indexer's parameters; RoPE half-split on the first dims of each head."""
    w = layer.input_layernorm.weight
    divided = x / w
    latent = w * divided * torch.rsqrt(divided.square().mean(-1, keepdim=True) + 1e-6)
    rotation = stock.model.rotary_emb(x[None], torch.arange(n)[None])[0]  # complex, [n, R / 2]
    cos, sin = rotation.real, rotation.imag

    def rotate(t, cos, sin):
        a, b, rest = t[..., :4], t[..., 4:8], t[..., 8:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    q = rotate((latent @ indexer.wq_b.weight.T).view(n, 4, 16), cos[:, None], sin[:, None])
    k = torch.nn.functional.layer_norm(x @ indexer.wk.weight.T, (16,), indexer.k_norm.weight, indexer.k_norm.bias, 1e-6)
    k = rotate(k, cos, sin)
    weights = (x @ indexer.weights_proj.weight.T) / (4 * 16) ** 0.5
    return torch.einsum("qh,qhk->qk", weights, torch.einsum("qhd,kd->qhk", q, k).relu())


def test_backends_agree(device, tiny_base):
    of_chunked, of_reference = (_kl_gradients(tiny_base, backend)[1] for backend in ("chunked", "reference"))
    for name, grad in of_chunked.items():
        assert (grad - of_reference[name]).abs().max() <= 1e-4 * of_reference[name].abs().max(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_latent_is_the_native_layouts(device, tiny_base, dtype):
    """The same rounding as a product with diag(1/w) and a norm module, so that indexers see what they will see."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RMSNorm

    from megatron_patch.checkpoint.native_weights import query_latent as exported

    generator = torch.Generator().manual_seed(0)
    w = (0.3 + torch.rand(64, generator=generator)).to(dtype)
    x = torch.randn(50, 64, generator=generator).to(dtype)
    tensors = exported(w)
    norm = DeepseekV2RMSNorm(64, eps=1e-6).to(dtype)
    norm.weight.data = tensors["q_a_layernorm.weight"]
    assert torch.equal(query_latent(x, w, 1e-6), norm(x @ tensors["q_a_proj.weight"].T))


def test_zero_norm_weights_are_refused(device, tiny_base):
    model, _ = indexed_model(tiny_base)
    with torch.no_grad():
        model.decoder.layers[1].input_layernorm.weight[3] = 0
    with pytest.raises(UserError, match="input_layernorm of layer 1 has 1 zeros"):
        initialize_base_indexers(model, std=0.1, seed=0)
