"""Loading: without these, a parameter can stay random, or a tensor of the directory be dropped without a word."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patch.checkpoint.hf_mapping import hybrid_mapping
from megatron_patch.checkpoint.load_base import load_base, load_trained, load_trained_from_export
from megatron_patch.errors import UserError
from megatron_patch.io.safetensors_dir import INDEX_FILE
from megatron_patch.model.architecture import read_architecture
from tests.checkpoint.models import random_trained, stand_in
from tests.tiny import CONFIG, make_tiny_base, tiny_state

PATTERN = ("mla",) * 3 + ("dsa",)
STATE = tiny_state(CONFIG)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def arch(base):
    return read_architecture(base)


def edit(base: Path, to: Path, change) -> Path:
    """A single-file copy of the base whose state `change` has edited."""
    to.mkdir()
    shutil.copy(base / "config.json", to)
    state = {name: tensor.clone() for name, tensor in STATE.items()}
    change(state)
    save_file(state, to / "model.safetensors")
    return to


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
def test_fills_every_base_parameter(tmp_path, arch, stored, kept, shards):
    base = make_tiny_base(tmp_path / "base", dtype=stored, shards=shards)
    model = stand_in(arch, PATTERN, kept)
    storage = {name: p.data_ptr() for name, p in model.named_parameters()}
    report = load_base(model, base, arch, PATTERN, progress=False)
    mapping = hybrid_mapping(arch, PATTERN)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.isnan().all()  # the new layers are the initialisation's business
        else:
            expected = mapping.to_megatron(name, STATE).to(stored).to(kept)  # bf16 into fp32 is exact
            assert torch.equal(parameter, expected), name
    assert storage == {name: p.data_ptr() for name, p in model.named_parameters()}  # in place: no second copy
    assert report.tensors == len(STATE) and report.elsewhere == 0 and report.ignored == ()
    assert dict(report.dtypes) == ({} if stored == kept else {(str(stored), str(kept)): len(STATE)})


def test_old_rope_frequencies_are_ignored_and_counted(tmp_path, base, arch):
    names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(3)]
    other = edit(base, tmp_path / "x", lambda state: state.update({name: torch.ones(4) for name in names}))
    report = load_base(stand_in(arch, PATTERN), other, arch, PATTERN, progress=False)
    assert sorted(report.ignored) == names and report.tensors == len(STATE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model.norm.weight"), r"1 missing \(model\.norm\.weight\)"),
        (lambda s: s.update({"model.layers.3.input_layernorm.weight": torch.ones(64)}), None),
        (
            lambda s: s.update({"model.layers.4.input_layernorm.weight": torch.ones(64)}),
            r"1 unknown \(model\.layers\.4",
        ),
        (lambda s: s.update({"model.layers.1.mlp.gate.e_score_correction_bias": torch.ones(8)}), r"1 unknown .*bias"),
        (
            lambda s: s.update({"model.norm.weight": torch.ones(65)}),
            r"model\.norm\.weight in .* is \(65,\), .* wants \(64,\)",
        ),
        (lambda s: s.update({"lm_head.weight": torch.ones(336, 64)}), r"vocab_size rows: .* has 336, .* says 320"),
    ],
)
def test_names_and_shapes_are_strict(tmp_path, base, arch, change, message):
    model = stand_in(arch, PATTERN)
    other = edit(base, tmp_path / "x", change)
    if message is None:  # a tensor of a DSA layer: an export can serve as the base
        load_base(model, other, arch, PATTERN, progress=False)
        return
    with pytest.raises(UserError, match=message):
        load_base(model, other, arch, PATTERN, progress=False)
    assert all(p.isnan().all() for p in model.parameters())  # refused before anything was written


def test_config_of_other_sizes(base, arch):
    small = read_architecture_with(base, n_routed_experts=7)
    with pytest.raises(UserError, match=r"unknown \(model\.layers\.1\.mlp\.experts\.7"):
        load_base(stand_in(small, PATTERN), base, small, PATTERN, progress=False)
    wide = read_architecture_with(base, moe_intermediate_size=48)
    with pytest.raises(UserError, match=r"shapes must agree: .* is \(32, 64\), .* wants \(48, 64\)"):
        load_base(stand_in(wide, PATTERN), base, wide, PATTERN, progress=False)


def read_architecture_with(base: Path, **changes):
    from megatron_patch.model.architecture import architecture_from_config

    return architecture_from_config({**json.loads((base / "config.json").read_text()), **changes})


def test_model_of_other_names_is_our_defect(base, arch):
    model = stand_in(arch, PATTERN)
    model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"1 unknown \['extra'\]"):
        load_base(model, base, arch, PATTERN, progress=False)
    model = stand_in(arch, PATTERN)
    del model.output_layer.weight
    with pytest.raises(ValueError, match=r"1 missing \['output_layer\.weight'\]"):
        load_base(model, base, arch, PATTERN, progress=False)


def test_part_of_a_model(base, arch):
    """Layers 1.. of a pipeline stage, experts 4 to 7 of an expert-parallel rank."""
    model = stand_in(arch, PATTERN)
    del model.embedding.word_embeddings.weight
    model.decoder.layers = renumber(model.decoder.layers, {"1": "0", "2": "1", "3": "2"})
    for layer in ("0", "1", "2"):
        experts = getattr(model.decoder.layers, layer).mlp.experts
        experts.local_experts = renumber(experts.local_experts, {str(e): str(e - 4) for e in range(4, 8)})
    report = load_base(model, base, arch, PATTERN, progress=False, layer_offset=1, local_experts=range(4, 8))
    loaded = dict(model.named_parameters())
    gate = loaded["decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"][:32]
    assert torch.equal(gate, STATE["model.layers.2.mlp.experts.6.gate_proj.weight"])
    assert not any(p.isnan().any() for p in loaded.values() if not p.requires_grad)
    assert report.tensors + report.elsewhere == len(STATE) and report.elsewhere > 0


def renumber(parent: torch.nn.Module, numbers: dict[str, str]) -> torch.nn.Module:
    new = torch.nn.Module()
    for old, to in numbers.items():
        new.add_module(to, getattr(parent, old))
    return new


def test_trained_weights(tmp_path, base, arch):
    trained = random_trained(arch, PATTERN, torch.float32)
    save_file(trained, tmp_path / "model.safetensors")
    model = stand_in(arch, PATTERN)
    load_base(model, base, arch, PATTERN, progress=False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert load_trained(model, tmp_path / "model.safetensors").tensors == len(trained)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained[name] if name in trained else before[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("decoder.layers.3.input_layernorm.weight"), r"1 missing \(decoder\.layers\.3\.input"),
        (
            lambda s: s.update({"decoder.layers.4.input_layernorm.weight": torch.ones(64)}),
            r"1 unknown \(decoder\.layers\.4",
        ),
        (lambda s: s.update({"output_layer.weight": torch.ones(320, 64)}), r"1 unknown \(output_layer"),
        (
            lambda s: s.update({"decoder.layers.3.input_layernorm.weight": torch.ones(63)}),
            r"is \(63,\), .* wants \(64,\)",
        ),
    ],
)
def test_trained_weights_are_strict_both_ways(tmp_path, arch, change, message):
    trained = random_trained(arch, PATTERN, torch.float32)
    change(trained)
    save_file(trained, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_trained(stand_in(arch, PATTERN), tmp_path / "model.safetensors")


def test_trained_weights_from_an_export(tmp_path, base, arch):
    trained = random_trained(arch, PATTERN, torch.float32)
    mapping = hybrid_mapping(arch, PATTERN)
    hf = {k: v.clone() for name, tensor in trained.items() for k, v in mapping.to_hf(name, tensor).items()}
    export = edit(base, tmp_path / "x", lambda state: state.update(hf))
    model = stand_in(arch, PATTERN)
    load_trained_from_export(model, export, arch, PATTERN)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained[name]) if name in trained else parameter.isnan().all()
    with pytest.raises(UserError, match=r"missing .* give an export with the same layer pattern"):
        load_trained_from_export(stand_in(arch, PATTERN), base, arch, PATTERN)


def test_index_that_lies_is_caught_before_loading(tmp_path, arch):
    base = make_tiny_base(tmp_path / "base")
    index = json.loads((base / INDEX_FILE).read_text())
    del index["weight_map"]["lm_head.weight"]
    (base / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"the first is lm_head\.weight"):
        load_base(stand_in(arch, PATTERN), base, arch, PATTERN, progress=False)


def test_tiny_state_is_what_the_files_hold(base):
    """The expectations above rest on this."""
    held = {}
    for shard in base.glob("*.safetensors"):
        held |= load_file(shard)
    assert held.keys() == STATE.keys() and all(torch.equal(held[name], STATE[name]) for name in STATE)
