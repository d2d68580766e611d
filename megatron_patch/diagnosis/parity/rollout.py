"""A rollout engine's side: log-probs of one sampled sequence as verl records them, perhaps with its routes.

The file is .jsonl (one sequence a line; the chosen one is `row`) or .npz, with verl's names:

    input_ids            [T]          prompt and response, without padding
    rollout_log_probs    [R]          of the response's tokens, the last R of input_ids
    routed_experts       [T or T-1, layers, K]   optional; vLLM's and SGLang's; rows of zeros where a layer is dense

From a verl batch: `batch.batch["input_ids"][i][mask]`, `batch.batch["rollout_log_probs"][i][:length]`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_patch.data.readers import parse_row, read_chunks
from megatron_patch.diagnosis.parity.records import Dump
from megatron_patch.errors import UserError


def load_rollout(file: Path, experts: int, first_dense: int, row: int = 0) -> Dump:
    """One sequence as a side.

    Args:
        file: as above.
        experts: routed experts of a layer.
        first_dense: dense layers below the first MoE layer.
        row: of a .jsonl file, from 0.

    Raises:
        UserError: the file is none of those, or its arrays do not fit each other.
    """
    content = _read(file, row)
    tokens, bounds = rollout_tokens(file, row)
    values = torch.as_tensor(np.asarray(content.get("rollout_log_probs", []), dtype=np.float32))
    total, response = len(tokens), len(values)
    if not 0 < response < total or values.dim() != 1:
        raise UserError(
            f"rollout_log_probs are those of the last tokens of input_ids: {file} has {response} for {total} tokens; give "
            "prompt and response in input_ids, without padding"
        )
    log_probs, predicts = torch.zeros(total), torch.zeros(total, dtype=torch.bool)
    log_probs[total - response - 1 : total - 1] = values
    predicts[total - response - 1 : total - 1] = True
    if not values.isfinite().all():
        raise UserError(f"log-probs must be finite: {file} has {int((~values.isfinite()).sum())} that are not")
    tensors = {"tokens": tokens, "cu_seqlens": bounds}
    tensors |= {"log_probs": log_probs, "predicts": predicts}
    tensors |= _routes(content, file, total, experts, first_dense)
    return Dump("rollout", str(file), "bfloat16", None, {}, tensors)


def rollout_tokens(file: Path, row: int = 0) -> tuple[Tensor, Tensor]:
    """(tokens, cu_seqlens) of one sequence."""
    tokens = _integers(_read(file, row), "input_ids", file)
    return tokens, torch.tensor([0, len(tokens)], dtype=torch.int32)


def _read(file: Path, row: int) -> dict[str, Any]:
    if file.suffix == ".npz":
        try:
            with np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except (OSError, ValueError) as error:
            raise UserError(f"a rollout is .jsonl or .npz without pickled objects: {file}: {error}; write it again") from None
    number = 0
    for chunk in read_chunks(file):
        for offset in range(len(chunk.rows)):
            content = parse_row(chunk, offset)
            if content is not None and number == row:
                return content
            number += content is not None
    raise UserError(f"--row must be below the number of sequences: {file} has {number}, row is {row}; lower it")


def _integers(content: dict[str, Any], name: str, file: Path) -> Tensor:
    value = np.asarray(content.get(name, []))
    if value.ndim != 1 or not len(value) or not np.issubdtype(value.dtype, np.integer):
        raise UserError(f"{name} must be a list of token ids: {file} has none; name it as verl does")
    return torch.as_tensor(value.astype(np.int64))


def _routes(content: dict[str, Any], file: Path, total: int, experts: int, first_dense: int) -> dict[str, Tensor]:
    """`layers.N.router` with 1/K for each chosen expert: engines record the ids, not the weights."""
    if content.get("routed_experts") is None:
        return {}
    ids = np.asarray(content["routed_experts"])
    if ids.ndim != 3 or len(ids) not in (total, total - 1) or ids.min() < 0 or ids.max() >= experts:
        raise UserError(
            f"routed_experts are [tokens, layers, top-k] of ids below {experts}: {file} has shape {ids.shape} and ids from "
            f"{ids.min() if ids.size else '-'} to {ids.max() if ids.size else '-'}; give the array as the engine returned it"
        )
    found = {}
    for layer in range(first_dense, ids.shape[1]):
        chosen = torch.as_tensor(ids[:, layer].astype(np.int64))
        weights = torch.zeros(total, experts)
        weights[: len(chosen)].scatter_(1, chosen, 1.0 / chosen.size(-1))
        found[f"layers.{layer}.router"] = weights
    return found
