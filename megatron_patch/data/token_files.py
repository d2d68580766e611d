"""Prepared text, P.bin, P.idx and P.json, checked before anything trusts it.

megatron-core's reader believes a damaged index, and reads past a truncated P.bin.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from megatron_patch.data.pretrain_corpus import SCHEMA
from megatron_patch.errors import UserError
from megatron_patch.io.strict_json import read_json

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_VERSION = 1
_INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
_TOKEN_BYTES = {4: 4, 8: 2}  # of the dtypes that prepare_pretrain.py writes: int32, uint16
_REPORT_KEYS = {"documents": int, "tokens": int, "vocab_size": int, "eos_id": int, "tokenizer": str, "tokenizer_sha256": str}


def read_report(prefix: str) -> dict[str, Any]:
    """P.json.

    Raises:
        UserError: it is missing, damaged or of another schema.
    """
    try:
        report = read_json(f"{prefix}.json")
        if report["schema"] != SCHEMA:
            raise ValueError(f"schema {report['schema']}, this version reads {SCHEMA}")
        for key, kind in _REPORT_KEYS.items():
            if type(report[key]) is not kind:
                raise ValueError(f"{key} is {report[key]!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"pretraining data are a prefix P that prepare_pretrain.py wrote (P.bin, P.idx, P.json): {prefix}.json is "
            f"not readable ({type(error).__name__}: {error}); run it first, or check the path"
        ) from None
    return report


def check_files(prefix: str, report: dict[str, Any]) -> int:
    """The number of documents, after checking that P.idx is whole and that P.bin and P.json fit it.

    Raises:
        UserError: a file is missing, damaged, or of another preparation.
    """
    for suffix in (".bin", ".idx"):
        path = Path(f"{prefix}{suffix}")
        if not path.is_file() or path.stat().st_size == 0:
            raise UserError(
                f"pretraining data are P.bin and P.idx: {path} is missing or empty; run prepare_pretrain.py again"
            )
    documents, tokens, width = _read_index(Path(f"{prefix}.idx"))
    size = Path(f"{prefix}.bin").stat().st_size
    if size != tokens * width:
        raise UserError(
            f"{prefix}.bin must have {tokens * width} bytes for the {tokens} tokens in its index: it has {size}; it is "
            "truncated or foreign, run prepare_pretrain.py again"
        )
    if (report["documents"], report["tokens"]) != (documents, tokens):
        raise UserError(
            f"P.json, P.idx and P.bin must be of one preparation: {prefix}.json says {report['documents']} documents of "
            f"{report['tokens']} tokens, the index {documents} of {tokens}; run prepare_pretrain.py again"
        )
    return documents


def _read_index(index: Path) -> tuple[int, int, int]:
    """(documents, tokens, bytes of a token), all that the index says being consistent."""
    damaged = f"{index} is damaged or no index of megatron-core"
    with index.open("rb") as file:
        header = file.read(_INDEX_HEADER.size)
        if len(header) < _INDEX_HEADER.size or not header.startswith(_INDEX_MAGIC):
            raise UserError(f"{damaged}; run prepare_pretrain.py again")
        _, version, code, documents, boundaries = _INDEX_HEADER.unpack(header)
        if version != _INDEX_VERSION or code not in _TOKEN_BYTES:
            raise UserError(
                f"{damaged}: version {version} and dtype code {code}, must be {_INDEX_VERSION} and one of "
                f"{', '.join(map(str, _TOKEN_BYTES))}; run prepare_pretrain.py again"
            )
        expected = _INDEX_HEADER.size + documents * (4 + 8) + boundaries * 8  # int32 lengths, int64 places, int64 ends
        if index.stat().st_size != expected or not documents:
            raise UserError(
                f"{index} must have {expected} bytes for its {documents} documents, and some document: it has "
                f"{index.stat().st_size} bytes; it is damaged, run prepare_pretrain.py again"
            )
        lengths = np.fromfile(file, dtype=np.int32, count=documents).astype(np.int64)
        places = np.fromfile(file, dtype=np.int64, count=documents)
        ends = np.fromfile(file, dtype=np.int64, count=boundaries)
    width = _TOKEN_BYTES[code]
    # Each document is one sequence, laid behind the one before it.
    whole = (lengths > 0).all() and np.array_equal(places, (np.cumsum(lengths) - lengths) * width)
    if not whole or not np.array_equal(ends, np.arange(documents + 1)):
        raise UserError(f"{damaged}: its lengths and places disagree; run prepare_pretrain.py again")
    return documents, int(lengths.sum()), width
