"""The lock on a directory; that a second run is refused is shown by the training commands (tests/training)."""

import errno
import fcntl
import os
import threading
import time

import pytest

from megatron_patch.errors import UserError
from megatron_patch.io.lock import only_writer


def test_a_second_writer_is_refused_until_the_first_has_left(tmp_path):
    refused = pytest.raises(UserError, match="one run at a time writes to --save")
    with only_writer(tmp_path, "--save"), refused, only_writer(tmp_path, "--save"):
        pass
    with only_writer(tmp_path, "--save"):
        pass


def test_a_writer_that_waits_comes_after_the_first(tmp_path):
    first = threading.Event()

    def hold() -> None:
        with only_writer(tmp_path, "--trunk-cache"):
            first.set()
            time.sleep(0.2)
            (tmp_path / "made").touch()

    other = threading.Thread(target=hold)
    other.start()
    first.wait()
    with only_writer(tmp_path, "--trunk-cache", wait=True):
        assert (tmp_path / "made").exists()
    other.join()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with only_writer(tmp_path, "--save"):
        pass
    assert "without locks (" in capsys.readouterr().err
