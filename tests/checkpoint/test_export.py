"""Export: without these, the base's weights, config or tokenizer change on the way, or half a directory stays."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_patch.checkpoint import export_files
from megatron_patch.checkpoint.base_shards import RENAMED_SINGLE
from megatron_patch.checkpoint.export import export
from megatron_patch.checkpoint.hf_mapping import hybrid_mapping
from megatron_patch.errors import UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.safetensors_dir import INDEX_FILE, SafetensorsDir
from megatron_patch.model.architecture import architecture_from_config
from tests.checkpoint.models import random_trained
from tests.checkpoint.runs import PATTERN, write_run
from tests.tiny import CONFIG, make_tiny_base, make_tiny_tokenizer, tiny_state

ARCH = architecture_from_config(CONFIG)
MAPPING = hybrid_mapping(ARCH, PATTERN)


def full_base(path: Path, **options) -> Path:
    return make_tiny_tokenizer(make_tiny_base(path, **options))


def test_base_shards_are_the_same_bytes(base, exported):
    for shard in base.glob("*.safetensors"):
        assert (exported / shard.name).read_bytes() == shard.read_bytes()
        assert not (exported / shard.name).is_symlink()


def test_trained_tensors_arrive_under_their_names(exported):
    source = SafetensorsDir(exported)
    trained = random_trained(ARCH, PATTERN, torch.float32)
    expected = {hf: t for name, tensor in trained.items() for hf, t in MAPPING.to_hf(name, tensor).items()}
    assert set(source.names) == set(MAPPING.hf_names) == set(tiny_state(CONFIG)) | set(expected)
    assert all(torch.equal(source.load(name), tensor) for name, tensor in expected.items())
    index = json.loads((exported / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": sum(source.nbytes(name) for name in source)}
    assert "model.layers.4.mlp.experts.7.up_proj.weight" in index["weight_map"]  # per expert, not fused


def test_config_keeps_every_other_key_as_it_stands(base, exported):
    before, after = (json.loads((path / "config.json").read_text()) for path in (base, exported))
    changed = {key: after[key] for key in after if before.get(key) != after[key]}
    assert changed == {
        "architectures": ["DeepseekV2DsaForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_deepseek_v2_dsa.DeepseekV2DsaConfig",
            "AutoModel": "modeling_deepseek_v2_dsa.DeepseekV2DsaModel",
            "AutoModelForCausalLM": "modeling_deepseek_v2_dsa.DeepseekV2DsaForCausalLM",
        },
        "num_hidden_layers": 5,
        "dsa_layers": [3, 4],
        "dsa_index_topk": 16,
        "dsa_index_n_heads": 3,
        "dsa_index_head_dim": 16,
        "dsa_q_rank": 64,
    }
    assert before.keys() <= after.keys() and after["rope_scaling"] == CONFIG["rope_scaling"]
    assert after["rope_theta"] == 10000 and after["torch_dtype"] == "float32" and "index_topk" not in after


def test_auto_map_of_the_base_is_replaced_and_its_code_left_behind(tmp_path, run, exported):
    base = full_base(tmp_path / "base", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV2Config"})
    (base / "configuration_deepseek.py").write_text("raise RuntimeError")
    tokenizer_config = json.loads((base / "tokenizer_config.json").read_text())
    tokenizer_config["auto_map"] = {"AutoTokenizer": ["tokenization_deepseek_fast.DeepseekTokenizerFast", None]}
    (base / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    export(write_run(tmp_path / "save", base), base, tmp_path / "out", progress=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    assert "deepseek.DeepseekV2Config" not in json.dumps(config)
    assert "auto_map" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    for directory in (tmp_path / "out", exported):
        assert sorted(file.name for file in directory.glob("*.py")) == [
            "configuration_deepseek_v2_dsa.py",
            "modeling_deepseek_v2_dsa.py",
        ]


def test_texts_come_along(base, exported):
    for name in ("tokenizer.json", "tokenizer_config.json", "LICENSE-MODEL"):
        assert (exported / name).read_bytes() == (base / name).read_bytes()
    template = base / "chat_template.jinja"  # transformers writes it beside the tokenizer
    assert template.is_file() and (exported / template.name).read_bytes() == template.read_bytes()
    made = json.loads((exported / "generation_config.json").read_text())
    assert made == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    readme = (exported / "README.md").read_text()
    for text in (
        "mla*3,dsa*2",
        "trust_remote_code=True",
        "without `trust_remote_code=True` nothing fails",
        "iteration 20",
        "override_config.attn_implementation=sdpa",
        "16 tokens",
        "layers 3, 4 were trained",
    ):
        assert text in readme, text


def test_generation_config_of_the_base_is_copied(tmp_path):
    base = full_base(tmp_path / "base")
    (base / "generation_config.json").write_text('{"temperature": 0.3}')
    export(write_run(tmp_path / "save", base), base, tmp_path / "out", progress=False)
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"temperature": 0.3}'


def test_manifest_names_base_training_and_every_file(base, run, exported):
    manifest = json.loads((exported / "upcycle_manifest.json").read_text())
    trained = json.loads((run / "iter_0000020" / "manifest.json").read_text())
    assert manifest["schema"] == 1 and manifest["kind"] == "upcycle" and manifest["layout"] == "hybrid"
    for key in ("base", "layer_pattern", "dsa", "frozen_sha256"):
        assert manifest[key] == trained[key]
    assert manifest["training"] == {k: trained[k] for k in ("kind", "iteration", "consumed_samples", "consumed_tokens")}
    assert manifest["versions"]["torch"] == torch.__version__
    assert set(manifest["files"]) == set(os.listdir(exported)) - {"upcycle_manifest.json"}
    assert all(file_sha256(exported / name) == sha256 for name, sha256 in manifest["files"].items())


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("how", ["copy", "symlink"])
def test_single_and_sharded_bases(tmp_path, shards, how):
    base = full_base(tmp_path / "base", shards=shards)
    export(write_run(tmp_path / "save", base), base, tmp_path / "out", base_shards=how, progress=False)
    source, state = SafetensorsDir(tmp_path / "out"), tiny_state(CONFIG)
    assert all(torch.equal(source.load(name), tensor) for name, tensor in state.items())
    assert not (tmp_path / "out" / "model.safetensors").exists()  # readers would take it and leave the DSA shard out
    for shard in base.glob("*.safetensors"):
        target = tmp_path / "out" / (RENAMED_SINGLE if shards == 1 else shard.name)
        assert target.is_symlink() == (how == "symlink") and target.samefile(shard) == (how == "symlink")
    manifest = json.loads((tmp_path / "out" / "upcycle_manifest.json").read_text())
    assert all(file_sha256(tmp_path / "out" / name) == sha256 for name, sha256 in manifest["files"].items())


@pytest.mark.parametrize(("of_base", "trained"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_new_tensors_take_the_dtype_of_the_base(tmp_path, capsys, of_base, trained):
    base = full_base(tmp_path / "base", dtype=of_base)
    export(write_run(tmp_path / "save", base, dtype=trained), base, tmp_path / "out", progress=False)
    source = SafetensorsDir(tmp_path / "out")
    assert {source.dtype(name) for name in source} == {of_base}
    expected = random_trained(ARCH, PATTERN, trained)["decoder.layers.3.self_attention.linear_proj.weight"].to(of_base)
    assert torch.equal(source.load("model.layers.3.self_attn.o_proj.weight"), expected)
    assert f"tensors were converted from {trained} to the base's {of_base}" in capsys.readouterr().out


def test_big_checkpoints_are_sharded(tmp_path, base, run, exported, monkeypatch):
    monkeypatch.setattr(sys.modules["megatron_patch.checkpoint.export"], "SHARD_BYTES", 50_000)
    export(run, base, tmp_path / "out", progress=False)
    shards = sorted(tmp_path.glob("out/model-dsa-*.safetensors"))
    assert len(shards) > 3 and shards[0].name.endswith(f"-of-{len(shards):05d}.safetensors")
    assert max(sum(t.nbytes for t in load_file(shard).values()) for shard in shards) <= 50_000
    one, many = SafetensorsDir(exported), SafetensorsDir(tmp_path / "out")
    assert set(one.names) == set(many.names) and all(torch.equal(one.load(n), many.load(n)) for n in one)


def test_copies_plainly_where_the_kernel_cannot(tmp_path, base, run, exported, monkeypatch):
    calls = []

    real = os.copy_file_range

    def refuse(reader, writer, count, start, end):
        calls.append(count)
        if start == 0:
            return real(reader, writer, 1000, start, end)  # a part is written before it fails
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    export(run, base, tmp_path / "out", progress=False)
    for shard in base.glob("*.safetensors"):
        assert (tmp_path / "out" / shard.name).read_bytes() == shard.read_bytes()
    assert len(calls) > 4


@pytest.mark.parametrize("layout", ["hybrid", "native"])
def test_a_copy_that_differs_is_noticed(tmp_path, base, run, monkeypatch, layout):
    real = os.copy_file_range

    def loses_a_byte(reader, writer, count, start, end):
        done = real(reader, writer, count, start, end)
        if done:
            os.pwrite(writer, bytes([os.pread(writer, 1, end)[0] ^ 1]), end)
        return done

    monkeypatch.setattr(os, "copy_file_range", loses_a_byte)
    with pytest.raises(OSError, match=r"the copy of .* differs from it"):
        export(run, base, tmp_path / "out", layout=layout, progress=False)
    assert os.listdir(tmp_path) == []  # nothing half-written stays


@pytest.mark.parametrize("fails", [True, False])
def test_a_disk_that_fills_up_is_told_and_short_writes_are_gone_on_with(tmp_path, base, run, exported, monkeypatch, fails):
    real = os.pwrite

    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    def short(file, piece, end):
        if fails and end > 3000:
            raise OSError(28, "No space left on device")
        return real(file, piece[:1000], end)

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(os, "pwrite", short)
    if fails:
        with pytest.raises(OSError, match="No space left"):
            export(run, base, tmp_path / "out", progress=False)
        assert os.listdir(tmp_path) == []
        return
    export(run, base, tmp_path / "out", progress=False)
    for shard in base.glob("*.safetensors"):
        assert (tmp_path / "out" / shard.name).read_bytes() == shard.read_bytes()


def test_other_base_is_refused_by_name(tmp_path, base, run):
    other = full_base(tmp_path / "other", seed=1)  # same sizes, other weights
    with pytest.raises(UserError, match=rf"trained on: it was {base} .*, .*other is another .*; give the former"):
        export(run, other, tmp_path / "out", progress=False)
    moved = shutil.copytree(base, tmp_path / "moved")
    export(run, moved, tmp_path / "out", progress=False)  # where it lies does not matter
    assert os.path.isdir(tmp_path / "out")


def nan(trained: dict) -> None:
    trained["decoder.layers.3.input_layernorm.weight"][0] = torch.nan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": "flat"}, "--layout must be hybrid or native: 'flat'"),
        ({"layout": "native", "base_shards": "symlink"}, "--base-shards symlink takes the base's files as they are"),
        ({"base_shards": "move"}, "--base-shards must be copy or symlink"),
        ({"iteration": 3}, r"3 was not, .* has \[20\]"),
    ],
)
def test_wrong_arguments(tmp_path, base, run, arguments, message):
    with pytest.raises(UserError, match=message):
        export(run, base, tmp_path / "out", progress=False, **arguments)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        ({}, nan, r"finite: decoder\.layers\.3\.input_layernorm\.weight in .* is not; use an older"),
        ({}, lambda t: t.pop("decoder.layers.3.self_attention.indexer.k_norm.bias"), r"1 missing \(decoder\.layers\.3"),
        ({}, lambda t: t.update({"output_layer.weight": torch.ones(1)}), r"1 unknown \(output_layer"),
        (
            {},
            lambda t: t.update({"decoder.layers.4.mlp.router.weight": torch.ones(7, 64)}),
            r"is \(7, 64\), .* wants \(8, 64\)",
        ),
        ({"layer_pattern": ("mla",) * 3 + ("dsa",)}, None, r"unknown \(decoder\.layers\.4"),
        ({"layer_pattern": ("dsa",) * 5}, None, "the layer pattern must be"),
        ({"q_rank": 32}, None, "the query latent must be as wide as the base: .* has 32, the base 64"),
        ({"files": {"model.safetensors": "0" * 64}}, None, "has changed"),
    ],
)
def test_checkpoint_that_is_not_sound(tmp_path, base, fields, change, message):
    save = write_run(tmp_path / "save", base, change=change, **fields)
    with pytest.raises(UserError, match=message):
        export(save, base, tmp_path / "out", progress=False)
    assert os.listdir(tmp_path) == ["save"]


def test_output_must_be_empty_and_base_complete(tmp_path, base, run, exported):
    with pytest.raises(UserError, match="is not empty"):
        export(run, base, exported, progress=False)
    bare = make_tiny_base(tmp_path / "bare")
    with pytest.raises(UserError, match="must have its tokenizer"):
        export(run, bare, tmp_path / "out", progress=False)
    with pytest.raises(UserError, match="has dsa_layers; give the model it was made from"):
        export_files.export_config(json.loads((exported / "config.json").read_text()), PATTERN, None, 64)
    with pytest.raises(UserError, match=r"nothing per layer: it has \['layer_types'\]"):
        export_files.export_config({**CONFIG, "layer_types": ["x"] * 3}, PATTERN, None, 64)


@pytest.mark.parametrize("layout", ["hybrid", "native"])
@pytest.mark.parametrize("inside", ["base", "checkpoint"])
def test_an_export_does_not_lie_in_what_it_is_made_of(base, run, layout, inside):
    output = (base if inside == "base" else run) / "export"
    with pytest.raises(UserError, match=f"--output must lie outside of --{inside}"):
        export(run, base, output, layout=layout, progress=False)
    assert not output.exists()
