"""Reading safetensors: without these, a broken or hostile directory fails late, or reads outside itself."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_patch.errors import UserError
from megatron_patch.io.safetensors_dir import INDEX_FILE, SafetensorsDir, SafetensorsFile


def write_shards(path: Path) -> dict[str, torch.Tensor]:
    tensors = {name: torch.randn(4, 3) for name in "abc"}
    save_file({"a": tensors["a"], "c": tensors["c"]}, path / "model-1.safetensors")
    save_file({"b": tensors["b"]}, path / "model-2.safetensors")
    write_index(path, {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"})
    return tensors


def write_index(path: Path, weight_map: dict) -> None:
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 144}, "weight_map": weight_map}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_single_file(tmp_path, dtype):
    tensor = torch.randn(5, 2).to(dtype)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    source = SafetensorsDir(tmp_path)
    assert source.names == ("x",) and source.files == ("model.safetensors",)
    assert source.shape("x") == (5, 2) and source.dtype("x") == dtype and source.nbytes("x") == tensor.nbytes
    assert torch.equal(source.load("x"), tensor)


def test_reads_shards(tmp_path):
    tensors = write_shards(tmp_path)
    source = SafetensorsDir(tmp_path)
    assert set(source.names) == set("abc") and len(source) == 3 and "a" in source and "z" not in source
    assert source.file_of("b") == "model-2.safetensors" and source.metadata == {"total_size": 144}
    for name, tensor in tensors.items():
        assert torch.equal(source.load(name), tensor)


def test_follows_symlinks_of_a_download_cache(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir(), snapshot.mkdir()
    save_file({"x": torch.ones(2)}, blobs / "0123abcd")
    (snapshot / "model.safetensors").symlink_to(blobs / "0123abcd")
    assert torch.equal(SafetensorsDir(snapshot).load("x"), torch.ones(2))


@pytest.mark.parametrize(
    "name",
    [
        "../model-1.safetensors",
        "/tmp/model-1.safetensors",
        "sub/x.safetensors",
        "..",
        "",
        7,
        "a\\b.safetensors",
        "model.bin",
        ".hidden.safetensors",
        "x\0.safetensors",
    ],
)
def test_index_cannot_leave_the_directory(tmp_path, name):
    inner = tmp_path / "inner"
    inner.mkdir()
    write_shards(inner)
    save_file({"a": torch.zeros(1)}, tmp_path / "model-1.safetensors")  # what a path out of `inner` would reach
    write_index(inner, {"a": name})
    with pytest.raises(UserError, match="own directory"):
        SafetensorsDir(inner)


def test_missing_shard(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-2\.safetensors does not; download"):
        SafetensorsDir(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_truncated_shard(tmp_path, keep):
    write_shards(tmp_path)
    shard = tmp_path / "model-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"must be whole: .*model-2\.safetensors.*truncated"):
        SafetensorsDir(tmp_path)


def test_git_lfs_pointer_is_no_shard(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(UserError, match="must be whole"):
        SafetensorsDir(tmp_path)


def test_index_and_shards_must_agree(tmp_path):
    write_shards(tmp_path)
    index = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    write_index(tmp_path, {**index, "d": "model-2.safetensors"})
    with pytest.raises(UserError, match=r"of the index must be in its shard: 1 are not, the first is d"):
        SafetensorsDir(tmp_path)
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    with pytest.raises(UserError, match=r"of a shard must be in the index, once: 1 are not, the first is c"):
        SafetensorsDir(tmp_path)
    save_file({"b": torch.ones(1), "a": torch.ones(1)}, tmp_path / "model-2.safetensors")  # "a" is in both shards
    write_index(tmp_path, index)
    with pytest.raises(UserError, match=r"once: 1 are not, the first is a of model-2"):
        SafetensorsDir(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": []}',
        '{"weight_map": {"a": "m.safetensors"}, "metadata": 3}',
        '{"weight_map": {"a": "model-1.safetensors", "a": "model-2.safetensors"}}',
    ],
)
def test_damaged_index(tmp_path, text):
    write_shards(tmp_path)
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(UserError, match="an index maps tensors to files"):
        SafetensorsDir(tmp_path)


def test_nothing_to_read_says_what_is_there(tmp_path):
    with pytest.raises(UserError, match="has neither"):
        SafetensorsDir(tmp_path)
    with pytest.raises(UserError, match="is none"):
        SafetensorsDir(tmp_path / "absent")
    save_file({"a": torch.ones(1)}, tmp_path / "model-1.safetensors")
    with pytest.raises(UserError, match="shards need their index"):
        SafetensorsDir(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UserError, match=r"can run code: .* has pytorch_model\.bin"):
        SafetensorsDir(tmp_path)


def test_single_file_beside_index_is_refused(tmp_path):
    write_shards(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="has both"):
        SafetensorsDir(tmp_path)


def test_single_file_missing(tmp_path):
    with pytest.raises(UserError, match="does not; download"):
        SafetensorsFile(tmp_path / "none.safetensors")
