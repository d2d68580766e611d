"""Publishing: without these, a crash can leave a half-written directory that loads."""

import json
import os
import stat
from pathlib import Path

import pytest

from megatron_patch.errors import UserError
from megatron_patch.io.publish import atomic_directory, atomic_write_json, atomic_write_text


def test_directory_appears_whole(tmp_path):
    target = tmp_path / "deep" / "out"
    with atomic_directory(target) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "file").write_text("x")
        assert not target.exists()
    assert (target / "sub" / "file").read_text() == "x"
    assert os.listdir(target.parent) == ["out"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o777 & ~umask()  # not mkdtemp's private one


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_stays_after_a_failure(tmp_path, error):
    with pytest.raises(error), atomic_directory(tmp_path / "out") as partial:
        (partial / "file").write_text("x")
        raise error
    assert os.listdir(tmp_path) == []


def test_empty_directory_is_taken_and_a_filled_one_refused(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with atomic_directory(out) as partial:
        (partial / "new").touch()
    assert os.listdir(out) == ["new"]
    with pytest.raises(UserError, match="is not empty; give another path"), atomic_directory(out):
        raise AssertionError("must not get here")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match="is something else"), atomic_directory(file, must_be_empty=False):
        raise AssertionError("must not get here")


def test_what_another_run_put_there_meanwhile_is_not_overwritten(tmp_path):
    with pytest.raises(UserError, match="out is not empty; give another path"), atomic_directory(tmp_path / "out") as ours:
        (ours / "ours").touch()
        with atomic_directory(tmp_path / "out") as theirs:
            (theirs / "theirs").touch()
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["theirs"]


def test_a_mount_point_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    with pytest.raises(UserError, match="disk is one; give a directory below it"), atomic_directory(tmp_path / "disk"):
        raise AssertionError("must not get here")
    assert os.listdir(tmp_path) == ["disk"]


def test_replaces_as_a_whole_on_request(tmp_path):
    out = tmp_path / "out"
    for name in ("old", "new"):
        with atomic_directory(out, must_be_empty=False) as partial:
            (partial / name).touch()
    assert os.listdir(out) == ["new"] and os.listdir(tmp_path) == ["out"]
    with pytest.raises(RuntimeError), atomic_directory(out, must_be_empty=False) as partial:
        raise RuntimeError
    assert os.listdir(out) == ["new"] and os.listdir(tmp_path) == ["out"]


def test_remains_of_a_killed_run_are_named(tmp_path, capsys):
    (tmp_path / ".out.partial-abc").mkdir()
    with atomic_directory(tmp_path / "out"):
        pass
    assert ".out.partial-abc was left by a run that was killed" in capsys.readouterr().err


def test_files(tmp_path):
    path = tmp_path / "sub" / "x.json"
    atomic_write_json(path, {"b": 1, "a": "é"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"b": 1, "a": "é"}
    assert path.read_text(encoding="utf-8").index('"b"') < path.read_text(encoding="utf-8").index('"a"')
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask()
    with pytest.raises(ValueError):
        atomic_write_json(path, {"a": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        atomic_write_text(path, "\ud800")
    assert os.listdir(path.parent) == ["x.json"] and json.loads(path.read_text(encoding="utf-8"))["b"] == 1


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_published_files_are_as_readable_as_any_other(tmp_path):
    """safetensors creates its files with mode 0600; a rollout engine of another user could not read them."""
    import os

    import torch
    from safetensors.torch import save_file

    previous = os.umask(0o022)
    try:
        with atomic_directory(tmp_path / "out") as directory:
            save_file({"a": torch.zeros(1)}, directory / "a.safetensors")
    finally:
        os.umask(previous)
    assert (tmp_path / "out" / "a.safetensors").stat().st_mode & 0o777 == 0o644
