"""A plan's masked dry run: the loss of a text under the whole model and under the masked one, before anything is written.

Both come from one loaded model, and so does their KL, which needs whole distributions: a few positions' at a time, since
the logits of a batch would be gigabytes.

Shape letters: B rows of a batch, S tokens, D hidden size, P scored positions of a batch, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_patch.errors import UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.load import check_device, load_model, load_tokenizer
from megatron_patch.pruning.masked import as_planned
from megatron_patch.pruning.plan_file import Plan
from megatron_patch.pruning.prompts import TEXT_KEY, check_vocabulary, encode_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS_AT_ONCE = 1 << 25  # numbers: 128 MiB in fp32
PAD = 0  # any id: padding stands on the right, where no scored position sees it
LARGEST_LOSS = 700  # nats: exp of more is no float
OTHERWISE = "leave out --dry-run, and score the pruned model where it is served (dsa-upcycle evaluate --endpoint)"


@dataclass(frozen=True)
class DryRun:
    """What is scored, and how.

    Attributes:
        data: file of JSON lines.
        text_key, chat, max_length: as in `prompts.encode_file`. Every token but a row's first is scored.
        batch_size: rows of a forward pass.
        dtype: "float32", "bfloat16", or "auto", the checkpoint's.
        device: of `load.check_device`.
    """

    data: Path
    text_key: str = TEXT_KEY
    chat: bool = False
    max_length: int = 2048
    batch_size: int = 8
    dtype: str = "auto"
    device: str | None = None

    def __post_init__(self) -> None:
        for flag, value, least in (("max-length", self.max_length, 2), ("batch-size", self.batch_size, 1)):
            if value < least:
                raise UserError(f"--{flag} must be {least} or more: {value}; see dsa-upcycle prune plan --help")
        if not self.data.is_file():
            raise UserError(f"--dry-run must be a file of JSON lines: {self.data} is none; check the path")
        check_device(self.device)


def encode(settings: DryRun, model: str | Path) -> list[Sequence[int]]:
    """Token ids of the rows that have a token to score, the longest first: a lack of memory shows at once.

    Raises:
        UserError: the data or the tokenizer break a rule.
    """
    keys = {"text_key": settings.text_key, "chat": settings.chat, "max_length": settings.max_length}
    encoded = encode_file(load_tokenizer(model), settings.data, **keys)
    check_vocabulary([encoded], model)
    rows = sorted((row for row in encoded.rows if len(row) > 1), key=len, reverse=True)
    if not rows:
        raise UserError(f"--dry-run must have a row of 2 tokens or more: {settings.data} has none; give longer texts")
    return rows


def run(checkpoint: MoeCheckpoint, plan: Plan, settings: DryRun, rows: Sequence[Sequence[int]]) -> dict:
    """The entry `dry_run` of plan.json.

    Args:
        rows: what `encode` gave.

    Returns:
        `file`, `sha256`, `rows`, `tokens` (scored), `dtype`, and of [whole, masked]: `loss` in nats per token,
        `perplexity`; `kl`: KL(whole || masked), nats per token.

    Raises:
        UserError: transformers cannot load the model, or its losses are not finite.
    """
    model = load_model(checkpoint.path, dtype=settings.dtype, device=check_device(settings.device), otherwise=OTHERWISE)
    sums, tokens = compare(model, rows, lambda: as_planned(model, checkpoint, plan), settings.batch_size)
    whole, masked, kl = (sums / tokens).tolist()
    if not (whole < LARGEST_LOSS and masked < LARGEST_LOSS and math.isfinite(kl)):  # false for NaN
        raise UserError(
            f"losses must be finite and below {LARGEST_LOSS} nats per token: {checkpoint.path} gives {whole:g}, masked "
            f"{masked:g}; try --dtype float32"
        )
    return {
        "file": str(settings.data),
        "sha256": file_sha256(settings.data),
        "rows": len(rows),
        "tokens": tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
        "loss": [whole, masked],
        "perplexity": [math.exp(whole), math.exp(masked)],
        "kl": kl,
    }


@torch.inference_mode()
def compare(
    model: "PreTrainedModel",
    rows: Sequence[Sequence[int]],
    mask: Callable[[], AbstractContextManager[None]],
    batch_size: int,
) -> tuple[Tensor, int]:
    """Sums over every token but each row's first.

    Args:
        rows: token ids, 2 or more each.
        mask: within the context that it gives, the model is the masked one.

    Returns:
        fp64 [3] in nats: loss of the whole model, of the masked one, and KL(whole || masked); and the number of tokens.
    """
    sums, tokens = torch.zeros(3, dtype=torch.float64), sum(len(row) - 1 for row in rows)
    with tqdm(total=tokens, unit="tok", unit_scale=True, desc="dry run") as bar:
        for begin in range(0, len(rows), batch_size):
            batch = rows[begin : begin + batch_size]
            longest = max(map(len, batch))
            ids_BS = torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in batch])
            real_BS = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
            scored_BS = real_BS[:, 1:].bool()
            hidden = []  # [P, D] of the whole model, of the masked one
            for context in (nullcontext, mask):
                with context():
                    out = model.base_model(
                        input_ids=ids_BS.to(model.device), attention_mask=real_BS.to(model.device), use_cache=False
                    )
                hidden.append(out.last_hidden_state[:, :-1][scored_BS.to(out.last_hidden_state.device)])
            sums += _sums(model, *hidden, ids_BS[:, 1:][scored_BS])
            bar.update(int(scored_BS.sum()))
    return sums, tokens


def _sums(model: "PreTrainedModel", whole_PD: Tensor, masked_PD: Tensor, target_P: Tensor) -> Tensor:
    """fp64 [3], as `compare`, of one batch."""
    head = model.get_output_embeddings()
    size, sums = max(1, LOGITS_AT_ONCE // head.weight.shape[0]), torch.zeros(3, dtype=torch.float64)
    for begin in range(0, len(target_P), size):
        part = slice(begin, begin + size)
        log_p, log_q = (head(hidden_PD[part]).float().log_softmax(-1) for hidden_PD in (whole_PD, masked_PD))
        target_P1 = target_P[part, None].to(log_p.device)
        kl_P = (log_p.exp() * (log_p - log_q)).sum(-1)
        values = (-log_p.gather(-1, target_P1), -log_q.gather(-1, target_P1), kl_P)
        sums += torch.stack([value.cpu().double().sum() for value in values])  # an accelerator may have no fp64
    return sums
