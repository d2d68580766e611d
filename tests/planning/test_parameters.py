"""Counts that a planner trusts: against the published model, the tiny files, the name table, and the built model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatron_patch.checkpoint.hf_mapping import hybrid_mapping, sizes
from megatron_patch.errors import UserError
from megatron_patch.model.architecture import Architecture, DsaSettings, read_architecture
from megatron_patch.model.layer_pattern import appended_pattern
from megatron_patch.planning.parameters import Count, count, parts

V2_LITE = Path(__file__).parents[1] / "data" / "deepseek_v2_lite_config.json"
TINY_DSA = DsaSettings(8, 4, 16)


def model_count(arch: Architecture, dsa_layers: int, dsa: DsaSettings) -> Count:
    return count(parts(arch, appended_pattern(arch.num_layers, dsa_layers), dsa))[1]


@pytest.fixture(scope="module")
def v2_lite() -> Architecture:
    return read_architecture(V2_LITE)


def test_v2_lite_has_the_published_size(v2_lite: Architecture) -> None:
    """15,706,484,224 is the published count; 2,451,437,056 active is its "2.4B activated"."""
    got = model_count(v2_lite, 0, DsaSettings())
    assert got == Count(15_706_484_224, 0, 2_451_437_056)


def test_two_dsa_layers_are_the_promised_size(v2_lite: Architecture) -> None:
    got = model_count(v2_lite, 2, DsaSettings())
    assert got.base == 15_706_484_224
    assert 1.1e9 < got.trainable < 1.3e9
    assert got.total == got.base + got.trainable


def test_base_equals_the_files(tiny_base: Path) -> None:
    """Every tensor of a real directory is in one part, once."""
    files = set(json.loads((tiny_base / "model.safetensors.index.json").read_text())["weight_map"].values())
    stored = 0
    for file in files:
        with safe_open(tiny_base / file, "pt") as shard:
            stored += sum(shard.get_tensor(name).numel() for name in shard.keys())  # noqa: SIM118
    assert model_count(read_architecture(tiny_base), 0, TINY_DSA).total == stored


@pytest.mark.parametrize("dsa_layers", [0, 1, 3])
def test_formulas_equal_the_name_table(v2_lite: Architecture, dsa_layers: int) -> None:
    """Two independent statements of the shapes: a change of one alone fails here."""
    dsa = DsaSettings(2048, 32, 128)
    mapping = hybrid_mapping(v2_lite, appended_pattern(27, dsa_layers))
    shapes = mapping.shapes(sizes(v2_lite, dsa)).values()
    numels = [s[0] * s[1] if len(s) == 2 else s[0] for s in shapes]
    assert model_count(v2_lite, dsa_layers, dsa).total == sum(numels)


def test_counts_equal_the_built_model(device, tiny_base: Path) -> None:
    from tests.model.build import tiny_model

    model, _, _ = tiny_model(tiny_base, 2, dsa=TINY_DSA)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    got = model_count(read_architecture(tiny_base), 2, TINY_DSA)
    assert (got.base, got.trainable) == (frozen, trainable)


def test_v2_lite_as_built_has_the_planned_size(device, v2_lite: Architecture) -> None:
    """The real configuration goes through the real builder, on the meta device."""
    from megatron_patch.model.builder import BuildSettings, build_model
    from megatron_patch.model.freeze import freeze_base
    from megatron_patch.ops.backends import choose_backend

    pattern = appended_pattern(27, 2)
    with torch.device("meta"):
        build = BuildSettings(dtype=torch.bfloat16)
        model, _ = build_model(v2_lite, pattern, DsaSettings(), build, choose_backend("auto", "cpu"))
    freeze_base(model, pattern)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    planned = model_count(v2_lite, 2, DsaSettings())
    assert (frozen, trainable) == (planned.base, planned.trainable)


def test_a_token_uses_its_experts_only(v2_lite: Architecture) -> None:
    by_name, _ = count(parts(v2_lite, appended_pattern(27, 2), DsaSettings()))
    experts = by_name["routed experts"]
    assert experts.active * 64 == experts.total * 6
    assert by_name["embedding"].active == 2048
    assert by_name["shared experts"].active == by_name["shared experts"].total


def test_pattern_must_start_with_the_base(v2_lite: Architecture) -> None:
    with pytest.raises(UserError, match=r"mla\*27"):
        parts(v2_lite, ("mla",) * 26 + ("dsa",) * 2, DsaSettings())
