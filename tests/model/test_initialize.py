"""Initialisation of the DSA layers and the frozen base under them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patch.errors import UserError
from megatron_patch.model.builder import forward_pack
from megatron_patch.model.freeze import frozen_sha256
from megatron_patch.model.initialize import initialize_dsa_layers
from tests.model.build import TINY_DSA, tiny_model
from tests.tiny import make_tiny_base

TOKENS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(6))
PACK = torch.tensor([0, 27, 40], dtype=torch.int32)  # both documents are longer than index_topk


@torch.no_grad()
def logits(model):
    return forward_pack(model.eval(), TOKENS, PACK)


def test_identity_equals_the_base_exactly(device, tiny_base):
    assert TINY_DSA.index_topk < 13
    base, _, _ = tiny_model(tiny_base, dsa_layers=0)
    model, state, _ = tiny_model(tiny_base, dsa_layers=2)
    assert (logits(model) - logits(base)).abs().max() == 0.0
    state.bypassed = frozenset({3, 4})
    assert (logits(model) - logits(base)).abs().max() == 0.0


@pytest.mark.parametrize(
    "lost", ["self_attention.linear_proj", "mlp.shared_experts.linear_fc2", "mlp.experts.local_experts.0.linear_fc2"]
)
def test_each_of_the_three_zeros_matters(device, tiny_base, lost):
    """Forgetting the shared experts' out-projection once moved logits by more than one."""
    base, _, _ = tiny_model(tiny_base, dsa_layers=0)
    model, _, _ = tiny_model(tiny_base, dsa_layers=2)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        name = f"{lost}.weight"
        parameters[f"decoder.layers.3.{name}"].copy_(parameters[f"decoder.layers.2.{name}"])
    assert (logits(model) - logits(base)).abs().max() > 1e-3


def test_copied_query_latent_reproduces_the_plain_projection(device, tiny_base):
    """With top-k over all tokens, a copied DSA layer is the base's last layer once more."""
    twice, state, _ = tiny_model(tiny_base, dsa_layers=1, init="copy")
    state.stage = "dense"
    base, _, _ = tiny_model(tiny_base, dsa_layers=0)
    layer = base.decoder.layers[-1]
    original = layer.forward

    def run_twice(hidden_states, *args, **kwargs):
        hidden_states, _context = original(hidden_states, *args, **kwargs)
        return original(hidden_states, *args, **kwargs)

    layer.forward = run_twice
    # fp32; the second normalisation of an already normalised input adds eps effects of about 1e-6 relative
    torch.testing.assert_close(logits(twice), logits(base), atol=5e-4, rtol=0)


def test_random_does_not_depend_on_order_and_differs_by_layer(device, tiny_base):
    first, _, pattern = tiny_model(tiny_base, init="random")
    again, _, _ = tiny_model(tiny_base, init="random")
    other, _, _ = tiny_model(tiny_base, init="random")
    initialize_dsa_layers(other, pattern, "random", std=0.1, seed=4)
    name = "self_attention.linear_q_up_proj.weight"
    layers = [dict(m.named_parameters()) for m in (first, again, other)]
    assert torch.equal(layers[0][f"decoder.layers.3.{name}"], layers[1][f"decoder.layers.3.{name}"])
    assert not torch.equal(layers[0][f"decoder.layers.3.{name}"], layers[0][f"decoder.layers.4.{name}"])
    assert not torch.equal(layers[0][f"decoder.layers.3.{name}"], layers[2][f"decoder.layers.3.{name}"])
    assert 0.09 < layers[0][f"decoder.layers.3.{name}"].std() < 0.11


def test_zero_norm_weight_is_refused(device, tmp_path):
    base = make_tiny_base(tmp_path, shards=1)
    state = load_file(base / "model.safetensors")
    state["model.layers.2.input_layernorm.weight"][5] = 0
    save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"norm weights.*1 zeros; use --dsa-init random"):
        tiny_model(base)
    tiny_model(base, init="random")


def test_only_dsa_layers_train_and_the_hash_sees_everything_else(device, tiny_base):
    model, _, pattern = tiny_model(tiny_base)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable and all(name.startswith(("decoder.layers.3.", "decoder.layers.4.")) for name in trainable)
    before = frozen_sha256(model, pattern)
    with torch.no_grad():
        dict(model.named_parameters())["decoder.layers.3.self_attention.linear_proj.weight"].add_(1)
    assert frozen_sha256(model, pattern) == before  # what trains may move
    for name, tensor in [
        ("parameter", dict(model.named_parameters())["decoder.layers.1.mlp.router.weight"]),
        ("buffer", dict(model.named_buffers())["decoder.layers.0.self_attention.rotary_pos_emb.cos_cached"]),
    ]:
        with torch.no_grad():
            value = tensor.flatten()[3].item()
            tensor.view(-1)[3] += 1
            assert frozen_sha256(model, pattern) != before, f"a frozen {name} moved unseen"
            tensor.view(-1)[3] = value
    assert frozen_sha256(model, pattern) == before
