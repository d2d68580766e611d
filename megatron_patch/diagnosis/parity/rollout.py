"""A rollout engine's side: log-probs of one sampled sequence as verl records them, perhaps with its routes.

The file is .jsonl (one sequence a line; the chosen one is `row`) or .npz, with verl's names:

    input_ids            [T]          prompt and response, without padding
    rollout_log_probs    [R]          of the response's tokens, the last R of input_ids
    routed_experts       [T or T-1, layers, K]   optional; vLLM's and SGLang's; rows of zeros where a layer is dense

From a verl batch: `batch.batch["input_ids"][i][mask]`, `batch.batch["rollout_log_probs"][i][:length]`.
"""

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from megatron_patch.data.readers import parse_row, read_chunks
from megatron_patch.diagnosis.parity.records import Dump
from megatron_patch.diagnosis.parity.weights_reader import ModelShape
from megatron_patch.errors import UserError


def load_rollout(file: Path, shape: ModelShape, row: int = 0) -> Dump:
    """One sequence as a side.

    Args:
        file: as above.
        shape: of the model that the engine served.
        row: of a .jsonl file, from 0.

    Raises:
        UserError: the file is none of those, or its arrays do not fit each other or the model.
    """
    content = _read(file, row)
    tokens, bounds = _tokens(content, file)
    values = _numbers(content, "rollout_log_probs", file)
    total, response = len(tokens), values.size
    if values.ndim != 1 or not 0 < response < total:
        raise UserError(
            f"rollout_log_probs are those of the last tokens of input_ids: {file} has {values.shape} for {total} tokens; give "
            "prompt and response in input_ids, without padding"
        )
    if not (values <= 0).all():
        raise UserError(
            f"log-probs must be finite and at most 0: {file} has {int((~(values <= 0)).sum())} that are not; write the engine's log-probs"
        )
    log_probs, predicts = torch.zeros(total), torch.zeros(total, dtype=torch.bool)
    log_probs[total - response - 1 : total - 1] = torch.as_tensor(values.astype(np.float32))
    predicts[total - response - 1 : total - 1] = True
    tensors = {"tokens": tokens, "cu_seqlens": bounds, "log_probs": log_probs, "predicts": predicts}
    return Dump("rollout", str(file), "unknown", None, {}, tensors | _routes(content, file, total, shape))


def rollout_tokens(file: Path, row: int = 0) -> tuple[Tensor, Tensor]:
    """(tokens, cu_seqlens) of one sequence."""
    return _tokens(_read(file, row), file)


def _read(file: Path, row: int) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"a side is a dump's directory or a rollout's file: {file} is neither; check the path")
    if file.suffix == ".npz":
        try:
            with np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except (OSError, ValueError, BadZipFile, KeyError) as error:
            raise UserError(f"a rollout is .jsonl or .npz without pickled objects: {file}: {error}; write it again") from None
    number = 0
    for chunk in read_chunks(file):
        for offset in range(len(chunk.rows)):
            content = parse_row(chunk, offset)
            if content is not None and number == row:
                return content
            number += content is not None
    raise UserError(f"a rollout's row must be there: {file} has {number} sequences, row {row} (from 0) was asked for; check --row")


def _numbers(content: dict[str, Any], name: str, file: Path) -> np.ndarray:
    """An array of numbers under a name, of any shape."""
    try:
        value = np.asarray(content[name])
        if value.dtype.kind not in "if":
            raise ValueError(f"it holds {value.dtype}")
        return value
    except KeyError:
        raise UserError(f"a rollout has {name}: {file} lacks it; name it as verl does") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{name} must be an array of numbers: {file}: {error}; write it as the engine returned it") from None


def _tokens(content: dict[str, Any], file: Path) -> tuple[Tensor, Tensor]:
    value = _numbers(content, "input_ids", file)
    if value.ndim != 1 or value.dtype.kind != "i" or not len(value):
        raise UserError(
            f"input_ids must be a flat list of whole numbers: {file} has shape {value.shape} of {value.dtype}; give one sequence"
        )
    return torch.as_tensor(value.astype(np.int64)), torch.tensor([0, len(value)], dtype=torch.int32)


def _routes(content: dict[str, Any], file: Path, total: int, shape: ModelShape) -> dict[str, Tensor]:
    """`layers.N.router` with 1/K for each chosen expert: engines record the ids, not the weights."""
    if content.get("routed_experts") is None:
        return {}
    ids = _numbers(content, "routed_experts", file)
    wanted = f"[{total} or {total - 1}, {shape.layers}, {shape.experts_per_token}] of ids from 0 to {shape.experts - 1}"
    right = ids.ndim == 3 and len(ids) in (total, total - 1) and ids.shape[1:] == (shape.layers, shape.experts_per_token)
    if not right or ids.dtype.kind != "i" or not len(ids) or ids.min() < 0 or ids.max() >= shape.experts:
        raise UserError(
            f"routed_experts are {wanted}, dense layers included: {file} has {ids.shape} of {ids.dtype}; give the array as the engine "
            "returned it, with rows of zeros for dense layers"
        )
    found = {}
    for layer in range(shape.dense_layers, shape.layers):
        chosen = torch.as_tensor(ids[:, layer].astype(np.int64))
        weights = torch.zeros(total, shape.experts)
        weights[: len(chosen)].scatter_(1, chosen, 1.0 / chosen.size(-1))
        if int((weights > 0).sum()) != chosen.numel():
            raise UserError(f"a token's experts are distinct: {file} names one twice in layer {layer}; give the array as the engine returned it")
        found[f"layers.{layer}.router"] = weights
    return found
