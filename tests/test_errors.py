"""How a run ends: one line and its code for the user's mistakes, a traceback for ours."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from megatron_patch import errors
from megatron_patch.io.publish import atomic_directory, atomic_write_text


def ends_with(error: BaseException) -> int:
    def main():
        raise error

    return errors.run(main)


def test_codes_and_lines(capsys):
    assert errors.run(lambda: None) == 0
    assert ends_with(errors.UserError("rule: value;\n remedy")) == 2
    assert capsys.readouterr().err == "error: rule: value; remedy\n"
    assert ends_with(errors.NonFiniteError("twice")) == 3


def test_a_path_that_the_system_refuses_is_the_users(tmp_path, capsys):
    (tmp_path / "file").write_text("")

    def main():
        (tmp_path / "file" / "below").mkdir()

    assert errors.run(main) == 2
    assert "file/below: Not a directory; check the path" in capsys.readouterr().err


@pytest.mark.parametrize("write", ["a file", "a directory"])
def test_a_full_disk_is_named_by_what_was_to_be_written(tmp_path, capsys, write):
    """A run writes to --save, --trunk-cache and more, which may lie on several disks."""

    def main():
        with mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):  # as a failed write: no name
            if write == "a file":
                atomic_write_text(tmp_path / "out", "text")
            else:
                with atomic_directory(tmp_path / "out") as partial:
                    (partial / "file").write_text("text")
                    os.fsync(0)

    assert errors.run(main) == 2
    line = f"error: the output needs space that can be written: {tmp_path / 'out'}: No space left on device; free some, or give another path"
    assert capsys.readouterr().err == line + "\n" and not list(tmp_path.iterdir())


def test_a_machines_first_rank_speaks_first(monkeypatch, capsys):
    """All ranks find the same wrong flag; torchrun ends the others while they wait. Who is left speaks too."""
    waited = []
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    monkeypatch.setattr(errors.signal, "signal", lambda *_: None)
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert ends_with(errors.UserError("rule")) == 2
        assert capsys.readouterr().err == "error: rule\n" and len(waited) == int(rank)
    said = errors.UserError("rule")
    said.said = True
    assert ends_with(said) == 2 and capsys.readouterr().err == "" and len(waited) == 1


@pytest.mark.parametrize("error", [OSError("no path in it"), KeyError("ours"), RuntimeError("ours")])
def test_our_defects_keep_their_traceback(error):
    with pytest.raises(type(error)):
        ends_with(error)


def test_a_reader_that_leaves_is_no_error():
    code = "import sys; from megatron_patch import errors; sys.exit(errors.run(lambda: [print('x' * 99) for _ in range(9999)] and 0))"
    command = f'{sys.executable} -c "{code}" | head -n 1 >/dev/null; exit ${{PIPESTATUS[0]}}'
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
