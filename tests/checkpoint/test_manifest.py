"""Manifests: without these, a damaged or foreign checkpoint is exported as if it were sound."""

import json

import pytest

from megatron_patch.checkpoint.manifest import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    iteration_directory,
    read_manifest,
    saved_iterations,
    verify_files,
)
from megatron_patch.errors import UserError
from tests.checkpoint.runs import PATTERN, write_run


def test_file_format_is_the_published_one(run, base):
    directory = run / "iter_0000020"
    content = json.loads((directory / MANIFEST_FILE).read_text())
    assert content == {
        "schema": 1,
        "kind": "pretrain",
        "iteration": 20,
        "consumed_samples": 160,
        "consumed_tokens": 10_000,
        "base": {"path": str(base), "sha256": content["base"]["sha256"]},
        "layer_pattern": ["mla", "mla", "mla", "dsa", "dsa"],
        "dsa": {"index_topk": 16, "index_n_heads": 3, "index_head_dim": 16, "q_rank": 64},
        "frozen_sha256": "f" * 64,
        "files": {WEIGHTS_FILE: content["files"][WEIGHTS_FILE]},
        "skipped": 0,
        "layout": {"data_parallel": 1, "distributed_optimizer": False, "expert_parallel": 1},
    }


def test_reads_what_it_wrote(run, tmp_path):
    manifest = read_manifest(run / "iter_0000020")
    assert manifest.layer_pattern == PATTERN and manifest.dsa.index_n_heads == 3 and manifest.q_rank == 64
    manifest.write(tmp_path)
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(schema=2), "schema is 2, this release reads 1"),
        (lambda m: m.update(kind="other"), "kind is 'other'"),
        (lambda m: m.pop("base"), "lacks 'base'"),
        (lambda m: m["dsa"].pop("q_rank"), "lacks 'q_rank'"),
        (lambda m: m["dsa"].update(more=1), "unexpected keyword argument 'more'"),
        (lambda m: m.update(iteration="x"), "invalid literal"),
    ],
)
def test_damaged_manifest(run, tmp_path, change, message):
    content = json.loads((run / "iter_0000020" / MANIFEST_FILE).read_text())
    change(content)
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        read_manifest(tmp_path)


def test_no_manifest(tmp_path):
    with pytest.raises(UserError, match=r"must hold manifest\.json: .* has none"):
        read_manifest(tmp_path)


def test_iterations(tmp_path, base):
    with pytest.raises(UserError, match=r"has latest_checkpointed_iteration\.txt: .* has none; give"):
        iteration_directory(tmp_path)
    for iteration in (20, 5):
        write_run(tmp_path, base, iteration=iteration)
    (tmp_path / "iter_x").mkdir()
    assert saved_iterations(tmp_path) == [5, 20]
    assert iteration_directory(tmp_path).name == "iter_0000005"  # what the file names, not the largest
    assert iteration_directory(tmp_path, 20).name == "iter_0000020"
    with pytest.raises(UserError, match=r"7 was not, .* has \[5, 20\]"):
        iteration_directory(tmp_path, 7)


def test_files_must_be_as_saved(tmp_path, base):
    directory = write_run(tmp_path, base) / "iter_0000020"
    manifest = read_manifest(directory)
    verify_files(directory, manifest)
    content = bytearray((directory / WEIGHTS_FILE).read_bytes())
    content[-1] ^= 1
    (directory / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors has changed"):
        verify_files(directory, manifest)
    verify_files(directory, manifest, only=())
    with pytest.raises(UserError, match=r"model\.safetensors has changed"):
        verify_files(directory, manifest, only=(WEIGHTS_FILE,))
    (directory / WEIGHTS_FILE).unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        verify_files(directory, manifest)
    manifest.files["../other"] = ""
    with pytest.raises(UserError, match=r"names files beside it: .* has '\.\./other'|is missing"):
        verify_files(directory, manifest)
