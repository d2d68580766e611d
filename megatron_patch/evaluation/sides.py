"""The two sides of a comparison as a user names them: a directory, a served model, or the base masked by a pruning plan.

Everything that can be refused before a model is loaded is refused here.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.errors import UserError
from megatron_patch.evaluation.encode import Example
from megatron_patch.evaluation.endpoint import Endpoint
from megatron_patch.evaluation.loading import ModelDirectory, inspect_directory
from megatron_patch.evaluation.recovery import PRUNE, UPCYCLE
from megatron_patch.io.hashes import directory_identity, file_sha256
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.masked import as_planned
from megatron_patch.pruning.plan_file import Plan, read_plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = (UPCYCLE, PRUNE)


@dataclass(frozen=True)
class Planned:
    """The base, masked as the plan in the file `path` says: it scores what the pruned checkpoint would."""

    directory: ModelDirectory
    path: Path
    plan: Plan
    checkpoint: MoeCheckpoint

    def mask(self, model: "PreTrainedModel") -> AbstractContextManager[None]:
        return as_planned(model, self.checkpoint, self.plan)


Side = ModelDirectory | Planned | Endpoint


@dataclass(frozen=True)
class Given:
    """The flags that say what is compared; `evaluate.run` explains them.

    Raises:
        UserError: they contradict each other.
    """

    kind: str
    base: str | Path
    model: str | Path | None = None
    endpoint: str | None = None
    endpoint_model: str | None = None
    plan: str | Path | None = None
    base_endpoint: str | None = None
    base_endpoint_model: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"--kind must be {' or '.join(KINDS)}: {self.kind!r}; choose one")
        ways = {"--model": self.model, "--endpoint": self.endpoint, "--plan": self.plan}
        named = [flag for flag, value in ways.items() if value is not None]
        if len(named) != 1:
            raise UserError(
                f"evaluate needs exactly one of {', '.join(ways)}: {' and '.join(named) or 'none'} given; --model DIR for an "
                "export or a pruned model, --endpoint URL for a served one, --plan FILE for the base masked by a plan"
            )
        for flag, url, name in (
            ("--endpoint", self.endpoint, self.endpoint_model),
            ("--base-endpoint", self.base_endpoint, self.base_endpoint_model),
        ):
            if url is None and name is not None:
                raise UserError(f"{flag}-model names what {flag} serves: {name!r} without one; leave it out")
        for flag, value in (("--plan", self.plan), ("--base-endpoint", self.base_endpoint)):
            if value is not None and self.kind != PRUNE:
                raise UserError(f"{flag} is for --kind {PRUNE}: {value} with --kind {self.kind}; add --kind {PRUNE}")
        if self.plan is not None and self.base_endpoint is not None:
            raise UserError(
                f"--plan masks a base that is loaded here: it cannot mask {self.base_endpoint}; leave out --base-endpoint, or "
                "apply the plan and serve the result (--endpoint)"
            )


def open_directories(given: Given, *, trust_remote_code: bool) -> tuple[ModelDirectory, ModelDirectory | Planned | None]:
    """The base's directory, and the model's; None where that is served.

    Raises:
        UserError: no such models, not of this `kind`, or a plan of another base.
    """
    prune = given.kind == PRUNE
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "any_family": prune}
    base = inspect_directory(given.base, weights=given.base_endpoint is None, **options)
    if given.plan is not None:
        checkpoint = MoeCheckpoint(given.base)
        return base, Planned(base, Path(given.plan), read_plan(given.plan, checkpoint), checkpoint)
    model = None if given.model is None else inspect_directory(given.model, **options)
    (_check_pruned if prune else _check_upcycled)(base, model)
    return base, model


def _check_pruned(base: ModelDirectory, model: ModelDirectory | None) -> None:
    if model is not None and base.dsa_layers != model.dsa_layers:
        raise UserError(
            f"a pruned model has the DSA layers of its base: {base.path} has {list(base.dsa_layers)}, {model.path} has "
            f"{list(model.dsa_layers)}; give the model that was pruned as --base, or use --kind {UPCYCLE}"
        )


def _check_upcycled(base: ModelDirectory, model: ModelDirectory | None) -> None:
    if base.dsa_layers:
        raise UserError(
            f"--base must be a base without DSA layers: {base.path} has some; give the model it was made from"
        )
    if model is not None and not model.dsa_layers:  # of a served one nothing tells what it is made of
        raise UserError(
            f"--kind {UPCYCLE} needs a --model with DSA layers: {model.path} has none; give what `dsa-upcycle export` "
            f"wrote, or --kind {PRUNE}"
        )


def check_fits(examples: list[list[Example]], directory: ModelDirectory) -> None:
    """Refuse rows that a model has no embedding or no position for.

    Raises:
        UserError: see above.
    """
    every = [example.ids for part in examples for example in part]
    largest, longest = max(map(max, every)), max(map(len, every))
    if largest >= directory.vocab_size:
        raise UserError(
            f"token ids must be below vocab_size: the suite has id {largest}, {directory.path} has "
            f"{directory.vocab_size} rows; the tokenizer is not this model's, copy the right one"
        )
    if longest > directory.max_positions:
        raise UserError(
            f"rows must fit into max_position_embeddings, where lm-eval would cut them: the longest has {longest} tokens, "
            f"{directory.path} takes {directory.max_positions}; give shorter rows, or a smaller max_length"
        )


def describe(side: Side) -> dict[str, Any]:
    """What recovery.json says of a side: where it is, and its SHA-256 (of the plan's file, where a plan masks the base)."""
    if isinstance(side, Endpoint):
        return {"path": side.url, "sha256": None, "served_name": side.model}
    if isinstance(side, Planned):
        return {"path": str(side.path), "sha256": file_sha256(side.path), "masked_base": True}
    return {"path": str(side.path), "sha256": directory_identity(side.path, progress=True)}
