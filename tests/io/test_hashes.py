"""Identities: without these, a checkpoint could be joined to a base that it was not trained on."""

import hashlib
import json

import pytest
import torch

from megatron_patch.errors import UserError
from megatron_patch.io.hashes import directory_identity, file_sha256, identity_of, model_file_hashes, tensor_sha256
from tests.tiny import make_tiny_base


def test_file(tmp_path):
    path = tmp_path / "x"
    content = bytes(range(256)) * 40_000  # more than one piece
    path.write_bytes(content)
    seen = []
    assert file_sha256(path, seen.append) == hashlib.sha256(content).hexdigest()
    assert sum(seen) == len(content) and len(seen) > 1


def test_tensor_is_bits_dtype_and_shape():
    x = torch.tensor([0.0, float("nan"), 3.0])
    assert tensor_sha256(x) == tensor_sha256(x.clone())
    others = [-x, x.bfloat16(), x.view(1, 3), x.view(torch.int32), x + 1, x.flip(0)]
    assert len({tensor_sha256(t) for t in [x, *others]}) == 7  # -0.0 differs from 0.0
    assert tensor_sha256(torch.arange(6).view(2, 3).t()) == tensor_sha256(torch.arange(6).view(2, 3).t().contiguous())
    tensor_sha256(torch.tensor(1.0)), tensor_sha256(torch.empty(0))


@pytest.mark.parametrize("shards", [1, 2])
def test_directory_identity_changes_with_config_and_weights_only(tmp_path, shards):
    base = make_tiny_base(tmp_path / "a", shards=shards)
    identity = directory_identity(base)
    assert identity == directory_identity(make_tiny_base(tmp_path / "b", shards=shards))  # the path does not count
    (base / "README.md").write_text("x")
    assert directory_identity(base) == identity
    assert identity_of(model_file_hashes(base)) == identity
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "routed_scaling_factor": 2.0}))
    assert directory_identity(base) != identity
    shard = sorted(base.glob("*.safetensors"))[0]
    other = make_tiny_base(tmp_path / "c", shards=shards)
    content = bytearray((other / shard.name).read_bytes())
    content[-1] ^= 1  # one bit of one weight
    (other / shard.name).write_bytes(content)
    assert directory_identity(other) != identity


def test_identity_needs_whole_weights(tmp_path):
    base = make_tiny_base(tmp_path / "a")
    shard = sorted(base.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(UserError, match="truncated"):
        directory_identity(base)
