"""Kept rows: whole or not there, of the right data, and with their space taken beforehand."""

import errno
import json
import os
import shutil
import signal
import time
from collections import namedtuple
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_patch.data import row_store
from megatron_patch.data.row_store import RowStore, amount, create_or_check
from megatron_patch.errors import UserError

STARTS = np.array([0, 700, 701, 2000, 4096])
WIDTH = 24
KEY = {"base_sha256": "a" * 64, "dtype": "bf16", "seq_length": 128, "isolate_documents": True, "split": None}
REMEDIES = {"seq_length": "give its --seq-length"}


def tokens(row: int) -> torch.Tensor:
    return torch.arange(STARTS[row], STARTS[row + 1])


def values(row: int, dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(row)
    return torch.randn(int(STARTS[row + 1] - STARTS[row]), WIDTH, generator=generator).to(dtype)


def opened(directory, dtype="bf16") -> RowStore:
    create_or_check(directory, KEY | {"dtype": dtype}, STARTS, WIDTH, REMEDIES)
    return RowStore(directory, STARTS, WIDTH, dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_rows_come_back_bit_for_bit(tmp_path, dtype):
    store, kind = opened(tmp_path / "c", dtype), row_store.DTYPES[dtype]
    assert [store.read(row, tokens(row)) for row in range(4)] == [None] * 4
    for row in (2, 0):
        store.write(row, tokens(row), values(row, kind))
    for reader in (store, opened(tmp_path / "c", dtype)):  # and by who opens it later
        for row in (2, 0):
            found = reader.read(row, tokens(row))
            assert found.dtype == kind and torch.equal(found, values(row, kind))
        assert reader.read(1, tokens(1)) is None and reader.missing(np.arange(4)).tolist() == [1, 3]


def test_other_tokens_are_refused(tmp_path):
    store = opened(tmp_path / "c")
    store.write(2, tokens(2), values(2))
    with pytest.raises(UserError, match=r"row 2 of .* was computed from other tokens"):
        store.read(2, tokens(2) + 1)


def test_a_killed_writer_leaves_whole_rows_only(tmp_path):
    """Killed at a random place, many times: what can be read is right."""
    opened(tmp_path / "c")
    done = set()
    for attempt in range(300):
        if attempt >= 12 and done:  # a busy machine takes longer to the first write
            break
        child = os.fork()
        if child == 0:
            store = RowStore(tmp_path / "c", STARTS, WIDTH, "bf16")
            while True:  # again and again, so that the kill falls into a write
                for row in range(4):
                    store.write(row, tokens(row), values(row))
        time.sleep(0.0004 * attempt)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        store = RowStore(tmp_path / "c", STARTS, WIDTH, "bf16")
        for row in range(4):
            found = store.read(row, tokens(row))
            assert found is None or torch.equal(found, values(row))
            done |= set() if found is None else {row}
        assert not store.damaged
        os.truncate(tmp_path / "c" / "rows.bin", 0)
        os.truncate(tmp_path / "c" / "rows.bin", 64)
    assert done


def test_the_record_comes_after_the_values(tmp_path, monkeypatch):
    store = opened(tmp_path / "c")
    write_all = row_store._write_all

    def killed(file, data, offset):
        if file == store._records:
            raise KeyboardInterrupt
        write_all(file, data, offset)

    monkeypatch.setattr(row_store, "_write_all", killed)
    with pytest.raises(KeyboardInterrupt):
        store.write(0, tokens(0), values(0))
    assert store.read(0, tokens(0)) is None


def test_values_that_never_reached_the_disk_are_not_used(tmp_path):
    """A power cut can keep the record and lose a page of the values."""
    store = opened(tmp_path / "c")
    store.write(3, tokens(3), values(3))
    with open(tmp_path / "c" / "values.bin", "r+b") as file:
        file.seek(2 * WIDTH * 2100)
        file.write(b"\0" * 512)
    assert store.read(3, tokens(3)) is None and store.damaged == [3]
    store.write(3, tokens(3), values(3))
    assert torch.equal(store.read(3, tokens(3)), values(3))


OTHERS = {
    "base_sha256": ("b" * 64, "base_sha256 is aaaaaaaaaaaa in .*, bbbbbbbbbbbb in this run; give another --trunk-cache"),
    "dtype": ("fp32", "dtype is bf16 in .*, fp32 in this run"),
    "seq_length": (64, "seq_length is 128 in .*, 64 in this run; give its --seq-length, or give another --trunk-cache"),
    "isolate_documents": (False, "isolate_documents is True in .*, False"),
    "split": ("95,5", "split is None in .*, 95,5"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_key_is_named(tmp_path, name):
    opened(tmp_path / "c")
    value, message = OTHERS[name]
    with pytest.raises(UserError, match=message):
        create_or_check(tmp_path / "c", KEY | {name: value}, STARTS, WIDTH, REMEDIES)
    with pytest.raises(UserError, match=r"width is 24 in .*, 48"):
        create_or_check(tmp_path / "c", KEY, STARTS, 48, REMEDIES)
    with pytest.raises(UserError, match=r"rows is 4 in .*, 3"):
        create_or_check(tmp_path / "c", KEY, STARTS[:4], WIDTH, REMEDIES)


DAMAGES = {
    "other files": (lambda c: (c / "manifest.json").rename(c / "notes.txt"), "has notes.txt and no manifest.json"),
    "short": (lambda c: os.truncate(c / "values.bin", 100), "values.bin has 100 bytes, its manifest says 196608"),
    "gone": (lambda c: (c / "rows.bin").unlink(), "rows.bin has 0 bytes"),
    "no json": (lambda c: (c / "manifest.json").write_text("{"), "has a readable manifest.json"),
    "schema": (lambda c: (c / "manifest.json").write_text('{"schema": 2, "key": {}}'), "has schema 1: .* has 2"),
    "a link": (lambda c: (shutil.rmtree(c), c.symlink_to(c.parent / "gone")), "is a link that leads nowhere"),
    "a file": (lambda c: (shutil.rmtree(c), c.write_text("")), "--trunk-cache must be a directory"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_no_cache_is_refused(tmp_path, name):
    opened(tmp_path / "c")
    damage, message = DAMAGES[name]
    damage(tmp_path / "c")
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "c")


def test_a_creation_that_was_killed_is_made_again(tmp_path):
    store = opened(tmp_path / "c")
    store.write(0, tokens(0), values(0))
    (tmp_path / "c" / "manifest.json").unlink()  # written last: without it nothing says what the rows are of
    assert opened(tmp_path / "c").read(0, tokens(0)) is None
    assert json.loads((tmp_path / "c" / "manifest.json").read_text())["bytes"] == {"values.bin": 196608, "rows.bin": 64}


def test_space_is_taken_for_the_rows_of_the_run_only(tmp_path):
    starts, said = np.arange(5) * 65536, []
    create_or_check(tmp_path / "c", KEY, starts, WIDTH, REMEDIES)
    store = RowStore(tmp_path / "c", starts, WIDTH, "bf16")
    size, of_row = tmp_path / "c" / "values.bin", 65536 * WIDTH * 2
    assert size.stat().st_blocks == 0
    store.reserve(np.array([1, 2]), said.append)
    assert size.stat().st_blocks * 512 == 2 * of_row and size.stat().st_size == 4 * of_row
    assert f"2 rows, 131,072 tokens x 24 x 2 bytes = {amount(2 * of_row)}; 0 rows are there, {amount(2 * of_row)} more" in said[0]
    store.write(1, torch.arange(65536), torch.ones(65536, WIDTH, dtype=torch.bfloat16))
    store.reserve(np.array([0, 1, 2]), said.append)
    assert f"1 rows are there, {amount(of_row)} more are needed" in said[1]
    assert size.stat().st_blocks * 512 == 3 * of_row


def test_a_file_that_ends_early_or_a_disk_that_fails_is_a_damaged_row(tmp_path, monkeypatch):
    """And not the SIGBUS of a mapped file: a bad sector, or another machine's hand, can come while a run reads."""
    store = opened(tmp_path / "c")
    store.write(2, tokens(2), values(2))
    assert torch.equal(store.read(2, tokens(2)), values(2))
    with monkeypatch.context() as patch:
        patch.setattr(row_store.os, "preadv", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        assert store.read(2, tokens(2)) is None and store.damaged == [2]
    os.truncate(tmp_path / "c" / "values.bin", 1000 * WIDTH * 2)
    assert store.read(2, tokens(2)) is None and store.damaged == [2, 2]
    with monkeypatch.context() as patch:
        patch.setattr(row_store.os, "pread", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        assert store.read(2, tokens(2)) is None and store.damaged == [2, 2, 2]
    os.truncate(tmp_path / "c" / "rows.bin", 2 * row_store._RECORD.size + 4)
    assert store.read(2, tokens(2)) is None and store.damaged == [2, 2, 2, 2]  # not of other tokens
    os.truncate(tmp_path / "c" / "rows.bin", 20)
    assert store.read(2, tokens(2)) is None and store.damaged == [2, 2, 2, 2]  # not there


def test_a_disk_too_small_takes_nothing(tmp_path, monkeypatch):
    store, said = opened(tmp_path / "c"), []
    monkeypatch.setattr(row_store.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(1000))
    with pytest.raises(UserError, match=r"the disk must hold the trunk cache: .* needs 196.61 KB more, 1.00 KB are free"):
        store.reserve(np.arange(4), said.append)
    assert len(said) == 1 and (tmp_path / "c" / "values.bin").stat().st_blocks == 0
    monkeypatch.undo()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(row_store.os, "posix_fallocate", full)  # as where a quota, and not the disk, is the limit
    with pytest.raises(UserError, match="the disk must hold the trunk cache"):
        store.reserve(np.arange(4), said.append)


def test_amounts():
    assert [amount(n) for n in (12, 4096, 16_777_216, 4.096e12, 4e15)] == ["12 B", "4.10 KB", "16.78 MB", "4.10 TB", "4,000.00 TB"]
