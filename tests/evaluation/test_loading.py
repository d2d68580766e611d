"""Loading is strict: names, shapes, softmax scale, code, tokenizer. Each fault here would otherwise lower a score unseen."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers.models.deepseek_v2 import modeling_deepseek_v2

from megatron_patch.checkpoint.export_files import CODE_FILES
from megatron_patch.data.tokenizer import load_tokenizer
from megatron_patch.errors import UserError
from megatron_patch.evaluation.loading import inspect_directory, load_common_tokenizer, load_model
from tests.evaluation.models import DSA, edit_json, edit_tensors
from tests.tiny import make_tiny_base

MODELLING = CODE_FILES[1]


@pytest.fixture
def broken(export, tmp_path):
    """A copy of the export, to be broken."""
    return shutil.copytree(export, tmp_path / "broken")


def test_inspect_names_the_dsa_layers(tiny_base, export):
    of_base, of_export = inspect_directory(tiny_base), inspect_directory(export)
    assert (of_base.dsa_layers, of_base.index_topk) == ((), None)
    assert (of_export.dsa_layers, of_export.index_topk, of_export.own_code) == ((3, 4), DSA.index_topk, False)


def test_a_base_is_loaded_by_the_stock_class_and_its_own_code_never_runs(tmp_path):
    base = make_tiny_base(tmp_path / "base")
    (base / "modeling_deepseek.py").write_text("raise SystemExit('code of the base ran')\n")
    edit_json(base / "config.json", auto_map={"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"})
    model = load_model(inspect_directory(base, trust_remote_code=True))
    assert type(model) is transformers.DeepseekV2ForCausalLM
    assert not model.training and model.dtype == torch.float32


def test_dtype_is_what_was_asked(tiny_base):
    assert load_model(inspect_directory(tiny_base), dtype=torch.bfloat16).dtype == torch.bfloat16


def _drop(tensors):
    del tensors["model.layers.4.self_attn.indexer.wk.weight"]


def _add(tensors):
    tensors["model.layers.4.self_attn.q_proj.weight"] = torch.zeros(2, 2)


def _reshape(tensors):
    tensors["model.layers.3.self_attn.o_proj.weight"] = torch.zeros(3, 3)


@pytest.mark.parametrize(
    ("change", "message"), [(_drop, "1 missing keys"), (_add, "1 unexpected keys"), (_reshape, "3")]
)
def test_refuses_tensors_that_are_not_the_models(broken, change, message):
    edit_tensors(broken, "model-dsa.safetensors", change)
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    kept = {name: file for name, file in index["weight_map"].items() if file != "model-dsa.safetensors"}
    with safe_open(broken / "model-dsa.safetensors", "pt") as file:
        kept |= dict.fromkeys(file.keys(), "model-dsa.safetensors")
    edit_json(broken / "model.safetensors.index.json", weight_map=kept)
    with pytest.raises(UserError, match=message):
        load_model(inspect_directory(broken))


def test_refuses_a_truncated_shard_before_loading(broken):
    shard = broken / "model-dsa.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(UserError, match="truncated or damaged"):
        inspect_directory(broken)


def test_refuses_a_transformers_without_yarns_softmax_scale(tiny_base, monkeypatch):
    """Before 5.16 the stock class leaves mscale^2 out: a base scored with it is not the base."""
    monkeypatch.setattr(modeling_deepseek_v2, "yarn_apply_mscale", lambda _rope, scale: scale)
    with pytest.raises(UserError, match=r"must include YaRN's factor: layer 0 .* use transformers 5\.16 or later"):
        load_model(inspect_directory(tiny_base))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dsa_layers": [5]}, r"dsa_layers must list layers from 0 to 4: .* has \[5\]"),
        ({"dsa_layers": ...}, "dsa_layers must list layers"),
        ({"dsa_index_topk": 0}, "dsa_index_topk must be a whole number above 0"),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "with which its DSA layers would get random weights"),
    ],
)
def test_refuses_a_config_that_does_not_say_what_the_model_is(broken, values, message):
    edit_json(broken / "config.json", **values)
    with pytest.raises(UserError, match=message):
        inspect_directory(broken)


def test_refuses_foreign_code_unless_trusted_and_then_runs_it(broken):
    with (broken / MODELLING).open("a") as file:
        file.write("\nDeepseekV2DsaForCausalLM.from_the_directory = True\n")
    with pytest.raises(UserError, match=rf"code must be this release's: {MODELLING} .* --trust-remote-code"):
        inspect_directory(broken)
    model = load_model(inspect_directory(broken, trust_remote_code=True))
    assert model.from_the_directory


def test_refuses_an_export_without_its_code(broken):
    (broken / MODELLING).unlink()
    with pytest.raises(UserError, match="is missing or another"):
        inspect_directory(broken)


def test_refuses_trusted_code_that_cannot_be_scrambled(broken):
    text = (broken / MODELLING).read_text().replace("index_selector", "other_selector")
    (broken / MODELLING).write_text(text)
    with pytest.raises(UserError, match="has no index_selector"):
        load_model(inspect_directory(broken, trust_remote_code=True))


def test_the_common_tokenizer_is_the_bases(tiny_base, export):
    assert load_common_tokenizer(tiny_base, export).get_vocab() == load_tokenizer(tiny_base).get_vocab()


def test_refuses_tokenizers_that_differ(tiny_base, broken):
    template = broken / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    with pytest.raises(UserError, match="the same chat templates"):
        load_common_tokenizer(tiny_base, broken)
    text = (broken / "tokenizer.json").read_text()
    vocabulary = load_tokenizer(broken).get_vocab()
    a, b = vocabulary["a"], vocabulary["b"]
    swapped = text.replace(f'"a": {a}', f'"a": {b}', 1).replace(f'"b": {b}', f'"b": {a}', 1)
    assert swapped != text
    (broken / "tokenizer.json").write_text(swapped)
    with pytest.raises(UserError, match="the same tokenizers"):
        load_common_tokenizer(tiny_base, broken)


@pytest.mark.parametrize(
    "auto_map",
    [..., {}, {"AutoModelForCausalLM": "someone/repository--modeling.Model"}, {"AutoModelForCausalLM": "../m.M"}],
)
def test_trusted_code_is_that_of_the_directory_alone(broken, auto_map):
    (broken / MODELLING).write_text("raise SystemExit('not reached')\n")
    edit_json(broken / "config.json", auto_map=auto_map)
    with pytest.raises(UserError, match=r"auto_map must name AutoModelForCausalLM as file\.Class"):
        load_model(inspect_directory(broken, trust_remote_code=True))
