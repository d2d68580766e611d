"""The check: each damage of an export that loads without a word must turn one line of the table red."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patch.checkpoint.check import check
from megatron_patch.errors import EXIT_OK, EXIT_USER, UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.safetensors_dir import INDEX_FILE
from tests.tiny import make_tiny_base

NAMES = [
    "config",
    "tensor names",
    "base tensors",
    "DSA tensors",
    "files",
    "code",
    "tokenizer",
    "chat template",
    "loads",
]


def results(export: Path, base: Path, tmp_path: Path, **options) -> dict[str, tuple[str, str]]:
    """Run the check; its JSON by name, and that the exit code agrees with it."""
    code = check(export, base, tmp_path / "check.json", **options)
    content = json.loads((tmp_path / "check.json").read_text())
    assert content["schema"] == 1 and [item["name"] for item in content["checks"]] == NAMES
    failed = any(item["status"] == "FAIL" for item in content["checks"])
    assert (content["verdict"], code) == (("fail", EXIT_USER) if failed else ("pass", EXIT_OK))
    return {item["name"]: (item["status"], item["detail"]) for item in content["checks"]}


@pytest.fixture
def copy(exported, tmp_path) -> Path:
    return shutil.copytree(exported, tmp_path / "export")


def forge_manifest(export: Path) -> None:
    """Make the recorded hashes those of the files, so that only the check at hand can notice."""
    manifest = json.loads((export / "upcycle_manifest.json").read_text())
    files = [item for item in export.iterdir() if item.name != "upcycle_manifest.json"]
    manifest["files"] = {item.name: file_sha256(item) for item in files}
    (export / "upcycle_manifest.json").write_text(json.dumps(manifest))


def edit_json(file: Path, change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_tensors(file: Path, change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_sound_export_passes(exported, base, tmp_path, capsys):
    found = results(exported, base, tmp_path)
    assert {status for status, _ in found.values()} == {"ok"}, found
    assert "bit-identical" in found["base tensors"][1] and "no missing, unexpected" in found["loads"][1]
    said = capsys.readouterr().out
    assert "verdict: pass" in said and "Without, transformers raises no error" in said


def test_no_load(exported, base, tmp_path):
    assert results(exported, base, tmp_path, load=False)["loads"] == ("skipped", "left out by --no-load")


def one_bit(tensors: dict) -> None:
    tensors[min(tensors)].view(torch.int32).view(-1)[0] ^= 1


def set_nan(tensors: dict) -> None:
    tensors["model.layers.4.self_attn.indexer.k_norm.bias"][3] = torch.nan


def wrong_shape(tensors: dict) -> None:
    tensors["model.layers.4.self_attn.indexer.k_norm.bias"] = torch.ones(15)


DSA_SHARD = "model-dsa-00001-of-00001.safetensors"


@pytest.mark.parametrize(
    ("shard", "change", "name", "message"),
    [
        ("model-00001-of-00002.safetensors", one_bit, "base tensors", "1 of "),
        (DSA_SHARD, set_nan, "DSA tensors", "k_norm.bias holds 1 values that are not finite"),
        (DSA_SHARD, wrong_shape, "DSA tensors", "k_norm.bias has shape (15,), must be (16,)"),
    ],
)
def test_damaged_weights(copy, base, tmp_path, shard, change, name, message):
    edit_tensors(copy / shard, change)
    found = results(copy, base, tmp_path)
    assert found[name][0] == "FAIL" and message in found[name][1]
    assert found["files"][0] == "FAIL" and shard in found["files"][1]
    assert found["loads"] == ("skipped", "not tried, for another check failed")
    forge_manifest(copy)
    found = results(copy, base, tmp_path)
    assert [n for n, (status, _) in found.items() if status == "FAIL"] == [name]


def test_tensor_missing_or_extra(copy, base, tmp_path):
    norm = "model.layers.3.input_layernorm.weight"

    def move(tensors):
        tensors["model.layers.5.input_layernorm.weight"] = tensors.pop(norm)

    edit_tensors(copy / DSA_SHARD, move)
    unreadable = results(copy, base, tmp_path)["tensor names"]
    assert unreadable[0] == "FAIL" and "of the index must be in its shard" in unreadable[1]
    edit_json(copy / INDEX_FILE, lambda index: move(index["weight_map"]))
    found = results(copy, base, tmp_path)
    assert found["tensor names"][0] == "FAIL" and f"1 missing ({norm})" in found["tensor names"][1]
    assert found["DSA tensors"] == ("FAIL", f"{norm} is missing")


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda c: c.pop("rope_scaling"), "rope_scaling: '(absent)'"),
        (lambda c: c.update(routed_scaling_factor=2.0), "routed_scaling_factor: 2.0, not 1.0"),
        (lambda c: c.update(architectures=["DeepseekV2ForCausalLM"]), "architectures: ['DeepseekV2ForCausalLM']"),
        (lambda c: c.update(architectures=["A", "DeepseekV2DsaForCausalLM"]), "architectures:"),
        (lambda c: c["auto_map"].update(AutoModel="other.Model"), "auto_map:"),
        (lambda c: c.update(index_topk=16), "index_topk: 16, not '(absent)'"),
        (lambda c: c.update(dsa_layers=[2, 4]), "dsa_layers: [2, 4], not [3, 4]"),
        (lambda c: c.pop("dsa_index_topk"), "lacks whole numbers"),
        (lambda c: c.update(tie_word_embeddings=None), "tie_word_embeddings: None, not False"),
    ],
)
def test_config_that_is_not_the_bases(copy, base, tmp_path, change, shown):
    edit_json(copy / "config.json", change)
    forge_manifest(copy)
    status, detail = results(copy, base, tmp_path)["config"]
    assert status == "FAIL" and shown in detail


def test_code_that_is_not_ours(copy, base, tmp_path):
    with (copy / "modeling_deepseek_v2_dsa.py").open("a") as file:
        file.write("\nraise RuntimeError('code of a model directory ran')\n")
    forge_manifest(copy)
    found = results(copy, base, tmp_path)
    assert [n for n, (status, _) in found.items() if status == "FAIL"] == ["code"]  # and it did not run
    (copy / "modeling_deepseek_v2_dsa.py").unlink()
    assert "modeling_deepseek_v2_dsa.py is missing" in results(copy, base, tmp_path)["code"][1]


def test_files_beyond_the_export(copy, base, tmp_path):
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04")
    found = results(copy, base, tmp_path)
    assert found["code"][0] == "FAIL" and "pytorch_model.bin" in found["code"][1]
    assert found["files"] == ("FAIL", "1 files are not written by the export: pytorch_model.bin")
    (copy / "pytorch_model.bin").unlink()
    (copy / "README.md").unlink()
    assert results(copy, base, tmp_path)["files"] == ("FAIL", "1 files are missing: README.md")


def test_tokenizer_without_its_bos(copy, base, tmp_path):
    edit_json(copy / "tokenizer_config.json", lambda c: c.update(bos_token="<eos>"))
    forge_manifest(copy)
    found = results(copy, base, tmp_path)
    assert found["tokenizer"] == ("FAIL", "bos_token_id is 2, the base's is 1")


def test_tokenizer_that_does_not_load(copy, base, tmp_path):
    (copy / "tokenizer.json").write_text("{}")
    found = results(copy, base, tmp_path)
    assert found["tokenizer"][0] == "FAIL" and "does not load" in found["tokenizer"][1]


def test_tokenizer_with_other_ids(copy, base, tmp_path):
    def swap(content):
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    edit_json(copy / "tokenizer.json", swap)
    assert "a test text gives other ids" in results(copy, base, tmp_path)["tokenizer"][1]


def test_chat_template_with_bos_twice(copy, base, tmp_path):
    """The same template in base and export, so that only the count can notice."""
    other = shutil.copytree(base, tmp_path / "other")
    template = (base / "chat_template.jinja").read_text()
    for directory in (copy, other):
        (directory / "chat_template.jinja").write_text("{{ bos_token }}" + template)
    found = results(copy, other, tmp_path)
    assert found["chat template"][0] == "FAIL" and "bos id 1 2 times" in found["chat template"][1]
    assert results(copy, base, tmp_path)["chat template"] == ("FAIL", "it is not the base's")
    for directory in (copy, other):
        (directory / "chat_template.jinja").unlink()
    assert results(copy, other, tmp_path)["chat template"][0] == "skipped"


def test_other_base(exported, tmp_path):
    other = make_tiny_base(tmp_path / "other", seed=1)
    assert results(exported, other, tmp_path)["base tensors"][0] == "FAIL"


def test_base_or_export_that_is_none(exported, base, tmp_path):
    with pytest.raises(UserError, match="is none; give the directory"):
        check(exported, tmp_path / "absent")
    with pytest.raises(UserError, match="has none; give the directory that holds config"):
        check(tmp_path, base)
