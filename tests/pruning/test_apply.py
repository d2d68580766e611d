"""What is written: bytes of what stays, contiguous numbers, a new index, a config with the plan's keys changed."""

import json
import os
import shutil

import pytest
import torch
from safetensors import safe_open

from megatron_patch.errors import UserError
from megatron_patch.pruning import apply, plan
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.wish import Wish
from tests.pruning import checkpoints
from tests.pruning.conftest import make_pruned, prune


def tree(path, without=(apply.PLAN_COPY,)) -> dict[str, bytes]:
    files = (item for item in path.rglob("*") if item.is_file())
    return {str(item.relative_to(path)): item.read_bytes() for item in files if item.name not in without}


KINDS = [
    ("deepseek_v2", {}),
    ("deepseek_v2", {"shards": 1}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"quantise": "fp8"}),
    ("deepseek_v32", {"quantise": "fp8"}),
    ("deepseek_v4", {}),
    ("deepseek_v4", {"quantise": "fp8"}),
    ("deepseek_v4", {"quantise": "fp4"}),
    ("deepseek_v4", {"quantise": "fp4", "prefix": "model."}),
]


@pytest.mark.parametrize("model_type, options", KINDS)
def test_keep_all_is_byte_identical(tmp_path, model_type, options):
    """Every file, MTP included; index and config too."""
    model = checkpoints.make(tmp_path / "model", model_type, **options)
    mtp = "scores" if MoeCheckpoint(model).mtp_layers else "drop"
    made = prune(tmp_path, model, None, Wish(keep=checkpoints.EXPERTS, mtp=mtp))
    assert tree(made.output) == tree(model)


@pytest.mark.parametrize("mtp", ["drop", "scores"])
@pytest.mark.parametrize("model_type, options", KINDS)
def test_kept_experts_are_their_source_bytes(tmp_path, model_type, options, mtp):
    """Read back by the safetensors library, expert by expert, weight and scale; nothing of a dropped expert is left."""
    model = checkpoints.make(tmp_path / "model", model_type, **options)
    source = MoeCheckpoint(model)
    if mtp == "scores" and not source.mtp_layers:
        pytest.skip("no MTP layer")
    layers = tuple(n for n, layer in source.layers.items() if mtp == "scores" or not layer.mtp)
    stats = checkpoints.make_statistics(model, tmp_path / "stats", layers=layers)
    made = prune(tmp_path, model, stats, Wish(keep=8, mtp=mtp))
    content = json.loads(made.plan.read_text())
    old, new = (read_all(path) for path in (model, made.output))
    naming, expected = source.naming, {}
    for name, tensor in old.items():
        key = naming.parse(name, source.config["num_hidden_layers"])
        if mtp == "drop" and key.layer is not None and key.layer >= source.config["num_hidden_layers"]:
            continue
        kept = content["layers"].get(str(key.layer), {}).get("old_to_new", {})
        if key.expert is not None:
            if str(key.expert) in kept:
                expected[name.replace(f"experts.{key.expert}.", f"experts.{kept[str(key.expert)]}.")] = tensor
        elif key.role.value in ("router", "bias"):
            expected[name] = tensor[[int(e) for e in kept]]
        elif key.role.value != "table":
            expected[name] = tensor
    tables = new.keys() - expected.keys()
    assert all(name.endswith("tid2eid") for name in tables) and len(tables) == len(content["tid2eid"])
    assert not expected.keys() - new.keys()
    for name, tensor in expected.items():
        assert new[name].dtype == tensor.dtype and torch.equal(bits(new[name]), bits(tensor)), name


def read_all(path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            found |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_index_and_config(pruned):
    output = MoeCheckpoint(pruned.output)  # its own scan: contiguous ids, one row per expert, index and shards agree
    index = json.loads((pruned.output / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == output.nbytes
    before, after = (json.loads((p / "config.json").read_text()) for p in (pruned.model, pruned.output))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed == set(json.loads(pruned.plan.read_text())["config_changes"])
    assert list(before) == list(after)
    assert after["n_routed_experts"] == 8 and not after.get("num_nextn_predict_layers")


def test_weight_and_scale_in_different_shards(tmp_path):
    made = make_pruned(tmp_path, "deepseek_v3", quantise="fp8")
    index = json.loads((made.output / "model.safetensors.index.json").read_text())["weight_map"]
    weight = "model.layers.1.mlp.experts.7.up_proj.weight"
    assert index[weight] != index[weight + "_scale_inv"]


def test_a_shard_that_loses_everything_is_not_written(tmp_path):
    """All of the MTP layer in a shard of its own, as DeepSeek-V3 has it."""
    config = checkpoints.CONFIGS["deepseek_v3"]
    state = checkpoints.with_mtp(checkpoints.state_of(config), config)
    model = checkpoints.write(tmp_path / "model", config, {k: v for k, v in state.items() if ".layers.3." not in k})
    from safetensors.torch import save_file

    mtp = {name: tensor.contiguous() for name, tensor in state.items() if ".layers.3." in name}
    save_file(mtp, model / "mtp.safetensors", metadata={"format": "pt"})
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(mtp, "mtp.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    made = prune(tmp_path, model, checkpoints.make_statistics(model, tmp_path / "s"), Wish(keep=8))
    assert not (made.output / "mtp.safetensors").exists()


def test_other_files_are_copied_never_linked(tmp_path, capsys):
    model = checkpoints.make(tmp_path / "model", "deepseek_v2")
    stats = checkpoints.make_statistics(model, tmp_path / "s")
    (tmp_path / "blob").write_text("linked\n")
    (model / "LICENSE").symlink_to(tmp_path / "blob")
    os.link(model / "README.md", tmp_path / "second name")
    (model / "pytorch_model.bin").write_bytes(b"stale")
    (model / ".cache").mkdir()
    (model / ".cache" / "x").touch()
    made = prune(tmp_path, model, stats, Wish(keep=8))
    assert (made.output / "LICENSE").read_text() == "linked\n" and not (made.output / "LICENSE").is_symlink()
    assert not (made.output / "README.md").samefile(model / "README.md")
    assert (made.output / "encoding" / "chat.py").is_file() and not (made.output / ".cache").exists()
    assert not (made.output / "pytorch_model.bin").exists()
    assert "pytorch_model.bin was not copied" in capsys.readouterr().out
    assert all(item.stat().st_nlink == 1 for item in made.output.rglob("*") if item.is_file())


def test_the_source_may_lie_in_a_cache_of_links(tmp_path):
    """As Hugging Face's cache has it: every file is a link to a blob."""
    model = checkpoints.make(tmp_path / "blobs", "deepseek_v3", quantise="fp8")
    links = tmp_path / "snapshot"
    links.mkdir()
    for item in model.iterdir():
        (links / item.name).symlink_to(item)
    made = prune(tmp_path, links, checkpoints.make_statistics(model, tmp_path / "s"), Wish(keep=8))
    assert not any(item.is_symlink() for item in made.output.rglob("*"))


def test_output_rules(tmp_path):
    made = make_pruned(tmp_path, "deepseek_v2")
    with pytest.raises(UserError, match="--output must be a new or empty directory"):
        apply.run(made.model, made.plan, made.output)
    with pytest.raises(UserError, match="--output must lie outside of --model"):
        apply.run(made.model, made.plan, made.model / "pruned")
    before = tree(made.output)
    assert apply.run(made.model, made.plan, made.output, resume=True) == 0  # complete already
    assert tree(made.output) == before
    partial = tmp_path / ".other.partial-prune"
    partial.mkdir()
    with pytest.raises(UserError, match=r"must have no unfinished run: .* give --resume"):
        apply.run(made.model, made.plan, tmp_path / "other")
    assert apply.run(made.model, made.plan, tmp_path / "other", resume=True, progress=False) == 0
    assert tree(tmp_path / "other") == before and not partial.exists()


def test_resume_refuses_another_plan_and_writes_damaged_shards_anew(tmp_path, monkeypatch):
    made = make_pruned(tmp_path, "deepseek_v3")
    written: list[str] = []
    real = apply.write_shard

    def stop_at_the_third(source, shard, target, progress):
        written.append(shard.file)
        if len(written) == 3:
            raise KeyboardInterrupt
        return real(source, shard, target, progress)

    monkeypatch.setattr(apply, "write_shard", stop_at_the_third)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        apply.run(made.model, made.plan, out, progress=False)
    plan.run(made.model, Wish(keep=12), stats=made.stats, output=tmp_path / "other.json")
    with pytest.raises(UserError, match="--resume must be of the same plan"):
        apply.run(made.model, tmp_path / "other.json", out, resume=True)
    partial = tmp_path / ".out.partial-prune"
    finished = sorted(item.name for item in partial.glob("*.safetensors"))
    assert finished == written[:2]
    damaged = bytearray((partial / finished[0]).read_bytes())
    damaged[-1] ^= 1
    (partial / finished[0]).write_bytes(damaged)
    first = written.copy()
    assert apply.run(made.model, made.plan, out, resume=True, progress=False) == 0
    assert written[3:] == [first[0], first[2]], "the whole one is kept, the damaged one is not"
    assert tree(out) == tree(made.output)


def test_a_full_disk_is_refused_before_writing(tmp_path, monkeypatch):
    made = make_pruned(tmp_path, "deepseek_v2")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(UserError, match="the disk must hold the output"):
        apply.run(made.model, made.plan, tmp_path / "out", progress=False)


def test_an_upcycled_export_is_pruned_like_its_base(tmp_path):
    """Its config has dsa_layers, its DSA layers have routers and experts of their own; other tensors are copied."""
    config = {**checkpoints.CONFIGS["deepseek_v2"], "num_hidden_layers": 4, "dsa_layers": [3]}
    state = checkpoints.state_of(config)
    state["model.layers.3.self_attn.indexer.wk.weight"] = torch.randn(8, 8)
    model = checkpoints.write(tmp_path / "model", config, state)
    (model / "upcycle_manifest.json").write_text("{}")  # with hashes of files that will have changed
    made = prune(tmp_path, model, checkpoints.make_statistics(model, tmp_path / "s"), Wish(keep=8))
    output = MoeCheckpoint(made.output)
    assert not (made.output / "upcycle_manifest.json").exists()
    assert sorted(output.layers) == [1, 2, 3] and "model.layers.3.self_attn.indexer.wk.weight" in output.tensors


def test_without_copies_in_the_kernel_the_bytes_are_the_same(tmp_path, monkeypatch):
    """Where two file systems cannot copy between themselves, and where a copy comes in parts."""
    made = make_pruned(tmp_path, "deepseek_v3", quantise="fp8")
    calls = []

    def refuse(*args):
        calls.append(args)
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    apply.run(made.model, made.plan, tmp_path / "plain", progress=False)
    assert tree(tmp_path / "plain") == tree(made.output) and calls
    monkeypatch.undo()
    real = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", lambda a, b, length, offset: real(a, b, min(length, 7), offset))
    apply.run(made.model, made.plan, tmp_path / "parts", progress=False)
    assert tree(tmp_path / "parts") == tree(made.output)


def test_a_disk_that_fails_is_no_silent_loss(tmp_path, monkeypatch):
    made = make_pruned(tmp_path, "deepseek_v3")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="No space left"):
        apply.run(made.model, made.plan, tmp_path / "out", progress=False)
    monkeypatch.undo()
    assert apply.run(made.model, made.plan, tmp_path / "out", resume=True, progress=False) == 0
    assert tree(tmp_path / "out") == tree(made.output)
