"""The ops under test: what the definition must satisfy, every implementation must."""

from collections.abc import Callable

import pytest

from megatron_patch.ops import by_length, chunked, sparse, sparse_rows
from megatron_patch.ops.backends import BACKENDS

# The documents of these tests fit into one chunk: cut into rows, they show what happens from one chunk to the next.
_ON_CPU = [name for name, backend in BACKENDS.items() if "cpu" in backend.devices]  # npu: test_npu.py
_ROWS = {"chunked, rows of 1": 1, "chunked, rows of 4": 4}


_PAIRS = "sparse, pairs only"


@pytest.fixture(params=[*_ON_CPU, *_ROWS, _PAIRS])
def dsa_attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Each backend's op in turn."""
    if request.param in _ROWS:
        monkeypatch.setattr(chunked, "chunk_rows", lambda *sizes: _ROWS[request.param])
        return chunked.dsa_attention
    if request.param == _PAIRS:  # of these lengths, masked products would be chosen
        monkeypatch.setattr(sparse, "MASKED_POSITIONS", 0)
        monkeypatch.setattr(sparse_rows, "block_rows", lambda *sizes: 3)
        return sparse.dsa_attention
    if request.param == "by-length":  # both of what it chooses from
        monkeypatch.setattr(by_length, "LONG_DOCUMENT", 4)
    return BACKENDS[request.param].attention
