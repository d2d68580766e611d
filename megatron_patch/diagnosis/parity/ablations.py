"""Which difference between the two sides makes the log-probs differ: force one side's choices, and see what is left."""

from typing import TYPE_CHECKING, Any

import torch

from megatron_patch.diagnosis.parity.checkpoint_side import run_model
from megatron_patch.diagnosis.parity.records import Dump

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Two fp32 implementations of one function agree to this in a log-prob (nats).
EXACT = 1e-5
SHARE = 0.1  # of the largest difference: less is left, so the cause is found


def ablations(trainer: Dump, checkpoint: Dump, model: "PreTrainedModel", fp32: float | None = None) -> list[dict[str, Any]]:
    """The checkpoint with the trainer's experts, keys, or both.

    Args:
        trainer, checkpoint: the sides as they ran.
        model: the checkpoint's, loaded as it ran.
        fp32: the largest difference of log-probs with both sides in fp32, if that was run.

    Returns:
        `name`, `logprob_max` (nats) and `closes`: whether hardly anything of the difference is left. Nothing closes a
        difference that fp32 arithmetic explains.
    """
    routes = {n: trainer.layer(n)["router"] for n in trainer.layers if "router" in trainer.layer(n)}
    selections = {n: trainer.layer(n)["indices"] for n in trainer.layers if "indices" in trainer.layer(n)}
    before = _largest(trainer, checkpoint.tensors["log_probs"])
    rows = []
    for name, forced in (
        ("force_routes", {"routes": routes}),
        ("force_indices", {"selections": selections}),
        ("force_routes_and_indices", {"routes": routes, "selections": selections}),
    ):
        found = run_model(model, trainer.tokens, trainer.cu_seqlens, **forced)
        rows.append(_row(name, _largest(trainer, found["log_probs"]), before))
    if fp32 is not None:
        rows.append(_row("fp32", fp32, before))
    return rows


def _largest(trainer: Dump, log_probs: torch.Tensor) -> float:
    return float((log_probs - trainer.tensors["log_probs"]).abs().max())


def _row(name: str, left: float, before: float) -> dict[str, Any]:
    return {"name": name, "logprob_max": left, "closes": before > EXACT and left <= max(SHARE * before, EXACT)}
