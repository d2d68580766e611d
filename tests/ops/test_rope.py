"""Rotary embeddings: both layouts by complex numbers, and the frequencies against transformers'."""

import cmath
import math

import pytest
import torch
from transformers import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding

from megatron_patch.ops.rope import apply_rope_half_split, apply_rope_interleaved, rope_cos_sin, rope_frequencies

V2_LITE = {
    "theta": 10000.0, "kind": "yarn", "factor": 40.0, "original_max_positions": 4096,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip


@pytest.mark.parametrize("rope_dim", [8, 64])
@pytest.mark.parametrize(
    "change",
    [
        {}, {"kind": "default"}, {"factor": 1.0}, {"mscale": 1.0}, {"mscale_all_dim": 0.0}, {"theta": 5e5},
        {"beta_fast": 16.0, "beta_slow": 2.0}, {"original_max_positions": 64},
    ],
)  # fmt: skip
def test_equals_transformers(rope_dim, change):
    """Frequencies bit-equal, cosine and sine to one rounding (transformers goes through torch.polar)."""
    rope = V2_LITE | change
    parameters = {"rope_type": rope["kind"], "rope_theta": rope["theta"]}
    if rope["kind"] == "yarn":
        parameters |= {n: rope[n] for n in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
        parameters["original_max_position_embeddings"] = rope["original_max_positions"]
    config = DeepseekV2Config(qk_rope_head_dim=rope_dim, rope_parameters=parameters, max_position_embeddings=163840)
    theirs = DeepseekV2RotaryEmbedding(config)
    frequencies, attention_factor = rope_frequencies(rope_dim, **rope)
    assert torch.equal(frequencies, theirs.inv_freq)
    assert attention_factor == theirs.attention_scaling
    positions = torch.tensor([0, 1, 2, 4095, 4096, 100000])
    complex_form = theirs(torch.zeros(1), positions[None])[0]
    cos, sin = rope_cos_sin(positions, rope_dim, **rope)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (6, rope_dim // 2)
    torch.testing.assert_close(cos, complex_form.real, rtol=0, atol=2e-7)
    torch.testing.assert_close(sin, complex_form.imag, rtol=0, atol=2e-7)


def test_yarn_keeps_fast_dims_and_slows_the_last():
    """The two ends of the ramp, known without the formula: 32 turns in 4096 keep, less than one is divided by 40."""
    yarn, _ = rope_frequencies(64, **V2_LITE)
    plain, _ = rope_frequencies(64, theta=10000.0)
    turns = plain * 4096 / (2 * math.pi)
    assert torch.equal(yarn[turns > 40], plain[turns > 40])
    torch.testing.assert_close(yarn[turns < 0.7], plain[turns < 0.7] / 40)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_layouts_are_complex_rotations(dtype, tolerance):
    """half-split pairs (i, i + R/2) of the first R dims; interleaved pairs (2i, 2i + 1). Swapping them is silent."""
    positions = torch.tensor([0, 3, 5])
    cos, sin = rope_cos_sin(positions, 4, theta=100.0)
    x = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    half, inter = apply_rope_half_split(x, cos, sin), apply_rope_interleaved(x[..., :4], cos, sin)
    assert half.dtype == inter.dtype == dtype and half.shape == x.shape
    for t, position in enumerate(positions.tolist()):
        for h in range(2):
            row = x[t, h].double().tolist()
            for i, frequency in enumerate((1.0, 0.1)):
                turn = cmath.exp(1j * position * frequency)
                a, b = complex(row[i], row[i + 2]) * turn, complex(row[2 * i], row[2 * i + 1]) * turn
                assert half[t, h, i].item() == pytest.approx(a.real, abs=tolerance)
                assert half[t, h, i + 2].item() == pytest.approx(a.imag, abs=tolerance)
                assert inter[t, h, 2 * i].item() == pytest.approx(b.real, abs=tolerance)
                assert inter[t, h, 2 * i + 1].item() == pytest.approx(b.imag, abs=tolerance)
    assert torch.equal(half[..., 4:], x[..., 4:])
    assert torch.equal(half[0], x[0]) and torch.equal(inter[0], x[0, :, :4])


def test_one_head_axis_or_none_or_two():
    cos, sin = rope_cos_sin(torch.arange(3), 4, theta=100.0)
    x = torch.randn(3, 2, 3, 6, generator=torch.Generator().manual_seed(1))
    whole = apply_rope_half_split(x, cos, sin)
    assert torch.equal(whole[:, 1], apply_rope_half_split(x[:, 1], cos, sin))
    assert torch.equal(whole[:, 1, 2], apply_rope_half_split(x[:, 1, 2], cos, sin))


def test_scores_depend_on_distance_only():
    """What RoPE is for; also says that positions may restart with each packed document."""
    g = torch.Generator().manual_seed(2)
    q, k = torch.randn(1, 8, generator=g), torch.randn(1, 8, generator=g)

    def score(rotate, m, n):
        at = [rope_cos_sin(torch.tensor([p]), 8, **V2_LITE) for p in (m, n)]
        return float((rotate(q, *at[0]) * rotate(k, *at[1])).sum())

    for rotate in (apply_rope_half_split, apply_rope_interleaved):
        assert score(rotate, 9, 4) == pytest.approx(score(rotate, 105, 100), abs=1e-4)
        assert abs(score(rotate, 9, 4) - score(rotate, 9, 5)) > 1e-2


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: rope_frequencies(5, theta=1e4), "even and positive"),
        (lambda: rope_frequencies(4, theta=1e4, kind="linear"), "'default' or 'yarn'"),
        (lambda: rope_cos_sin(torch.zeros(2, 3), 4, theta=1e4), "positions must be"),
        (lambda: apply_rope_half_split(torch.zeros(3, 3, 4), torch.zeros(2, 2), torch.zeros(2, 2)), "x must be"),
        (lambda: apply_rope_half_split(torch.zeros(3, 3), torch.zeros(3, 2), torch.zeros(3, 2)), "fewer than"),
        (lambda: apply_rope_interleaved(torch.zeros(3, 6), torch.zeros(3, 2), torch.zeros(3, 2)), "rotates all dims"),
    ],
)
def test_refuses_wrong_shapes(call, message):
    with pytest.raises(ValueError, match=message):
        call()
