"""The real model through its checkpoint and export into transformers: the trainer's logits, in every environment."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_patch.checkpoint.check import check
from megatron_patch.checkpoint.export import export
from megatron_patch.checkpoint.hf_mapping import dsa_names, hybrid_mapping
from megatron_patch.checkpoint.load_base import load_base, load_trained_from_export
from megatron_patch.checkpoint.manifest import iteration_directory, read_manifest, verify_files
from megatron_patch.checkpoint.resume import choose_checkpoint, load_weights
from megatron_patch.checkpoint.save import Identity, Progress, take_snapshot
from megatron_patch.checkpoint.saver import Saver
from megatron_patch.io.hashes import directory_identity
from megatron_patch.model.architecture import read_architecture
from megatron_patch.model.builder import forward_pack
from tests.hf_model.test_older_transformers import run_elsewhere
from tests.model.build import TINY_DSA, tiny_model

TOKENS = 64
TOLERANCE = 2e-5  # fp32, logits up to about 10; the two sides add in different orders


@pytest.fixture(scope="module")
def journey(device, base, tmp_path_factory):
    """(model, save directory, export, identity) of a model whose every trained value is random."""
    path = tmp_path_factory.mktemp("real")
    model, _, pattern = tiny_model(base, init="copy")
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    identity = Identity("sft", str(base), directory_identity(base), pattern, TINY_DSA, 64, "f" * 64)
    Saver(keep_last=0).save(take_snapshot(path / "save", model, {}, identity, Progress(iteration=30, consumed_samples=240)), background=False)
    export(path / "save", base, path / "export", progress=False)
    return model, path / "save", path / "export", identity


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 320, (TOKENS,), generator=torch.Generator().manual_seed(6))


@torch.no_grad()
def our_logits(model, tokens):
    return forward_pack(model.eval(), tokens, torch.tensor([0, tokens.numel()], dtype=torch.int32))


def test_the_table_names_the_real_models_parameters(journey, base):
    model, *_ = journey
    arch = read_architecture(base)
    mapping = hybrid_mapping(arch, journey[3].layer_pattern)
    assert {name for name, _ in model.named_parameters()} == set(mapping.entries)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(dsa_names(mapping, arch))


def test_checkpoint_has_the_manifest_that_export_reads(journey):
    _, save, _, identity = journey
    manifest = read_manifest(iteration_directory(save))
    assert manifest.kind == "sft" and manifest.iteration == 30 and manifest.consumed_samples == 240
    assert manifest.base.sha256 == identity.base_sha256 and manifest.dsa == TINY_DSA
    assert manifest.layer_pattern == identity.layer_pattern and manifest.q_rank == 64
    verify_files(iteration_directory(save), manifest)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_transformers_gives_the_trainers_logits(journey, tokens, attention):
    """Beyond the top-k of 8 as well: a wrong indexer, head order or expert would show there."""
    model, _, exported, _ = journey
    theirs, info = AutoModelForCausalLM.from_pretrained(
        exported, trust_remote_code=True, attn_implementation=attention, output_loading_info=True
    )
    assert type(theirs).__name__ == "DeepseekV2DsaForCausalLM"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = our_logits(model, tokens)
    assert expected.abs().max() > 1 and TINY_DSA.index_topk < TOKENS
    assert (theirs.eval()(tokens[None]).logits[0] - expected).abs().max() <= TOLERANCE


def test_older_transformers_gives_the_trainers_logits(journey, tokens, tmp_path):
    """In verl's environment (transformers 5.9.0)."""
    model, _, exported, _ = journey
    report, out = run_elsewhere(exported, tokens[None], tmp_path)
    assert report["transformers"].startswith("5.9.") and not any(report["problems"].values())
    assert (out["logits"][0] - our_logits(model, tokens)).abs().max() <= TOLERANCE


@torch.no_grad()
def test_stock_class_is_silently_another_model(journey, tokens):
    """The warning in the export's README is true: no error, other logits."""
    model, _, exported, _ = journey
    stock = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=False)
    assert type(stock).__name__ == "DeepseekV2ForCausalLM"
    assert (stock.eval()(tokens[None]).logits[0] - our_logits(model, tokens)).abs().max() > 1e-2


def test_check_passes(journey, base, tmp_path):
    assert check(journey[2], base, tmp_path / "check.json") == 0
    assert json.loads((tmp_path / "check.json").read_text())["verdict"] == "pass"


def test_trained_weights_come_back_from_checkpoint_and_export(journey, base):
    model, save, exported, identity = journey
    expected = {name: p for name, p in model.named_parameters()}
    for load in (
        lambda other: load_weights(*choose_checkpoint(save, whole_state=False), other, identity, same_kind=True),
        lambda other: load_trained_from_export(other, exported, read_architecture(base), identity.layer_pattern),
    ):
        other, _, _ = tiny_model(base, init="random")
        load(other)
        assert all(torch.equal(p, expected[name]) for name, p in other.named_parameters())


def test_an_export_can_stand_for_its_base(journey, base):
    """Its base shards are the base's, so the base part of a model loads from it."""
    arch, pattern = read_architecture(base), journey[3].layer_pattern
    other, _, _ = tiny_model(base, init="random")
    before = {name: p.clone() for name, p in other.named_parameters()}
    load_base(other, journey[2], arch, pattern, progress=False)
    assert all(torch.equal(p, before[name]) for name, p in other.named_parameters())
