"""Statistics of the expert ids that a rollout engine recorded: `--from-routed-experts FILE`.

A record is one request: integer ids [tokens, layers, K], where `layers` is either all decoder layers (rows of dense layers
are all zero) or the MoE layers alone. Files:

.npz      every array is a record, under any name
.npy      one record
.parquet  a column `routed_experts`, a record a row: nested lists, or bytes or base64 text of int32 in C order; optional
          column `source`
.jsonl    an object a line: {"routed_experts": nested lists, or base64 of int32 or of a .npy file, "source": optional}.
          Responses of the engines will do as they are: of SGLang's /generate ({"meta_info": {"routed_experts",
          "prompt_tokens", "completion_tokens"}}) and of vLLM's completions ({"choices": [{"routed_experts"}],
          "prompt_routed_experts"})

vLLM (`enable_return_routed_experts`) gives arrays, base64 of .npy over HTTP, in some releases the prompt's apart. SGLang
(`--enable-return-routed-experts`, `return_routed_experts` in the request) gives base64 of int32. Neither has the last
token, which is never fed: prompt + completion - 1 rows.

Ids alone: no routing weights, so that only the frequency criterion can be used.
"""

import base64
import binascii
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from megatron_patch.errors import EXIT_OK, UserError
from megatron_patch.io.strict_json import parse_json
from megatron_patch.pruning.moe_layers import MoeLayers, read_moe_layers
from megatron_patch.pruning.observe import check_output, print_summary
from megatron_patch.pruning.statistics import SourceStatistics, Statistics, check_source_name, model_sha256

KEY, PROMPT_KEY = "routed_experts", "prompt_routed_experts"
_NPY = b"\x93NUMPY"  # how a .npy file begins
Record = tuple[str, str | None, Any, int | None]  # where, source, ids in any form, number of tokens if known
# Refused rather than guessed: not numbers, truncated archives, pickles.
_DAMAGE = (ValueError, OSError, EOFError, KeyError, TypeError, OverflowError)


def run(model: str | Path, files: list[Path], output: str | Path, sources: list[str] | tuple[str, ...] = ()) -> int:
    """Count recorded expert ids and write statistics. Of the model only config and index (or header) are read.

    Args:
        sources: a name per file; default: the file's own. A record's `source` goes before it.

    Raises:
        UserError: a file that is none of the forms, or ids that this model cannot have given.
    """
    output = Path(output)
    check_output(output)
    if sources and len(sources) != len(files):
        raise UserError(f"--source names each file: {len(sources)} names for {len(files)} files; give as many")
    layers = read_moe_layers(model)
    shape = (len(layers.layers), layers.num_experts)
    found: dict[str, SourceStatistics] = {}
    skipped = 0
    for path, name in zip(files, sources or [path.stem for path in files], strict=True):
        seen = False
        for where, source, ids, tokens in tqdm(read_records(path), unit="record", desc=f"decode {path.name}"):
            counts, unrecorded = count_record(decode(ids, layers, where, tokens), layers, where)
            skipped, seen = skipped + unrecorded, True
            source = check_source_name(source or name)
            found[source] = found.get(source, SourceStatistics.routed_only(0, torch.zeros(shape, dtype=torch.int64))) + counts
        if not seen:
            raise UserError(f"a file of expert ids must hold a record: {path} has none; record again")
    statistics = Statistics(
        layers.model_type, model_sha256(model), layers.layers, layers.num_experts, layers.top_k, sources=found
    )
    if not any(source.tokens for source in found.values()):
        raise UserError(f"expert ids must be recorded: all {skipped} tokens have zeros; start the engine with its flag")
    statistics.save(output)
    if skipped:
        print(f"{skipped:,} tokens have no ids (not recorded) and were left out")
    print_summary(statistics)
    print(f"written: {output}")
    return EXIT_OK


def read_records(path: str | Path) -> Iterator[Record]:
    """The records of a file, as they stand.

    Raises:
        UserError: missing, damaged, or of an unknown form.
    """
    path = Path(path)
    readers = {".npz": _npz, ".npy": _npy, ".parquet": _parquet, ".jsonl": _jsonl}
    if path.suffix not in readers:
        raise UserError(f"a file of expert ids ends with {', '.join(readers)}: {path} does not; see prune observe --help")
    if not path.is_file():
        raise UserError(f"a file of expert ids must exist: {path} does not; check the path")
    yield from readers[path.suffix](path)


def decode(ids: Any, layers: MoeLayers, where: str, tokens: int | None = None) -> np.ndarray:
    """A record's ids in any of the forms -> integers [tokens, layers, K].

    Args:
        ids: array, nested lists, bytes or base64 text.
        tokens: how many there must be, if that is known.

    Raises:
        UserError: another type or size.
    """
    per_token = {number * layers.top_k: number for number in (len(layers.layers), layers.num_layers)}
    try:
        if isinstance(ids, str):
            ids = base64.b64decode(ids, validate=True)
        if isinstance(ids, bytes) and ids.startswith(_NPY):
            ids = np.load(io.BytesIO(ids), allow_pickle=False)
        if isinstance(ids, bytes):
            flat = np.frombuffer(ids, dtype="<i4")
            if tokens is None:  # all decoder layers, as both engines give; else the MoE layers alone
                fits = [size for size in (layers.num_layers * layers.top_k, *per_token) if flat.size % size == 0]
            else:
                fits = [size for size in per_token if flat.size == tokens * size]
            if not fits:
                raise ValueError(f"{flat.size} ids are not {tokens or 'whole'} tokens of {_layer_counts(layers)} layers")
            array = flat.reshape(-1, per_token[fits[0]], layers.top_k)
        else:
            array = np.asarray(ids)
    except (ValueError, TypeError, EOFError, binascii.Error) as error:
        raise UserError(f"{where}: expert ids must be base64 of int32 or .npy, or numbers [tokens, layers, top-k]: {error}") from None
    expected = {(number, layers.top_k) for number in per_token.values()}
    if array.ndim != 3 or array.dtype.kind not in "iu" or array.shape[1:] not in expected:
        raise UserError(
            f"{where}: expert ids must be whole numbers [tokens, {_layer_counts(layers)}, {layers.top_k}]: they are "
            f"{array.dtype} {list(array.shape)}; the recording is of another model, or damaged"
        )
    if tokens is not None and len(array) != tokens:
        raise UserError(f"{where}: there must be ids of {tokens} tokens: there are {len(array)}; the recording is damaged")
    return array.astype(np.int64)


def count_record(ids: np.ndarray, layers: MoeLayers, where: str) -> tuple[SourceStatistics, int]:
    """Counts of one record, and the number of its tokens that have no ids.

    An engine's buffer holds 0 (or -1) for a token that it did not record. Distinct experts cannot all be 0, so such a
    token is told apart from one that was sent to expert 0; with top-1 it cannot be, and zeros count.

    Args:
        ids: [tokens, layers, K] of `decode`.

    Raises:
        UserError: an id out of range, one expert twice for a token, or ids in a dense layer.
    """
    numbers = list(layers.layers)
    if ids.shape[1] == layers.num_layers:
        dense = np.delete(ids, numbers, axis=1)
        if (dense > 0).any():
            raise UserError(
                f"{where}: rows of dense layers must be zero: the layers {_dense(layers)} have ids; the recording is of "
                "another model"
            )
        ids = ids[:, numbers]
    absent = (ids == -1).all(axis=2)
    if layers.top_k > 1:
        absent |= (ids == 0).all(axis=2)
    whole = ~absent.any(axis=1)
    if (absent.any(axis=1) & ~absent.all(axis=1)).any():
        token = int(np.flatnonzero(absent.any(axis=1) & ~absent.all(axis=1))[0])
        layer = numbers[int(np.flatnonzero(absent[token])[0])]
        raise UserError(
            f"{where}: a token has ids in every MoE layer or in none: token {token} lacks those of layer {layer}; the "
            "recording is of another model, or damaged"
        )
    ids = ids[whole]
    wrong = (ids < 0) | (ids >= layers.num_experts)
    if wrong.any():
        raise UserError(
            f"{where}: expert ids must be from 0 to {layers.num_experts - 1}: there is {int(ids[wrong][0])}; the recording "
            "is of another model, or damaged"
        )
    ordered = np.sort(ids, axis=2)
    if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
        raise UserError(f"{where}: a token's experts are distinct: some stand twice; the recording is damaged")
    rows = (np.arange(len(numbers))[None, :, None] * layers.num_experts + ids).reshape(-1)
    count = np.bincount(rows, minlength=len(numbers) * layers.num_experts).reshape(len(numbers), -1)
    return SourceStatistics.routed_only(int(whole.sum()), torch.from_numpy(count.astype(np.int64))), int((~whole).sum())


def _layer_counts(layers: MoeLayers) -> str:
    return " or ".join(map(str, sorted({len(layers.layers), layers.num_layers})))


def _dense(layers: MoeLayers) -> str:
    return ", ".join(str(i) for i in range(layers.num_layers) if i not in layers.layers)


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"a file of expert ids must be whole: {path}: {error or type(error).__name__}; record again")


def _npz(path: Path) -> Iterator[Record]:
    import zipfile

    try:
        with np.load(path, allow_pickle=False) as content:
            for name in content.files:
                yield f"{path}:{name}", None, content[name], None
    except (*_DAMAGE, AttributeError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from None


def _npy(path: Path) -> Iterator[Record]:
    try:
        content = np.load(path, allow_pickle=False)
    except _DAMAGE as error:
        raise _damaged(path, error) from None
    yield str(path), None, content, None


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        columns = [name for name in (KEY, "source") if name in file.schema_arrow.names]
        if KEY not in columns:
            raise UserError(f"a parquet file of expert ids has a column {KEY}: {path} has {file.schema_arrow.names}")
        rows = (row for batch in file.iter_batches(64, columns=columns) for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"{path}: row {number}", row.get("source"), row[KEY], None
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from None


def _jsonl(path: Path) -> Iterator[Record]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield from _response(parse_json(line), f"{path}:{number}")
    except UserError:
        raise
    except ValueError as error:
        raise _damaged(path, error) from None


def _response(row: Any, where: str) -> Iterator[Record]:
    """The records in an object of ours or in a response of an engine. SGLang's says how many ids there must be."""
    if not isinstance(row, dict):
        row = {}
    source, info, tokens = row.get("source"), row.get("meta_info"), None
    found = [row.get(KEY), row.get(PROMPT_KEY)]
    if isinstance(info, dict):
        found.append(info.get(KEY))
        counts = (info.get("prompt_tokens"), info.get("completion_tokens"))
        if all(isinstance(count, int) for count in counts):
            tokens = sum(counts) - 1
    if isinstance(choices := row.get("choices"), list):
        found += [choice.get(KEY) for choice in choices if isinstance(choice, dict)]
    found = [ids for ids in found if ids is not None]
    if not found:
        raise UserError(
            f"{where}: a line must hold {KEY}, itself, in meta_info or in choices: it does not; start the engine with its "
            "flag, and ask for them in the request"
        )
    for ids in found:
        yield where, source, ids, tokens
