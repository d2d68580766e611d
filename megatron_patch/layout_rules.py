"""Which layouts a run may have: one table. What is not proven equal to one process is refused, with the way out.

The proofs are `tests/training/test_data_parallel.py` and `test_expert_parallel_runs.py`; known faults of other layouts
stand beside their rules. A rule that needs what is not known yet (the number of ranks, the base) is asked again later.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_patch.errors import UserError


@dataclass(frozen=True)
class Launch:
    """What decides whether a layout is allowed. None: not known yet."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    context: int = 1
    sequence: bool = False
    distributed_optimizer: bool = False
    optimizer: str = "adam"
    train: str = "dsa"
    timeout_minutes: float = 30.0
    ranks: int | None = None
    experts: int | None = None


@dataclass(frozen=True)
class Rule:
    """`holds` says whether a launch keeps it; the rest is the message: the rule, the values, the remedy."""

    text: str
    holds: Callable[[Launch], bool]
    values: Callable[[Launch], object]
    remedy: str


def _only_one(flag: str, size: Callable[[Launch], int]) -> Rule:
    return Rule(
        f"{flag} must be 1: no other layout is proven equal in this release",
        lambda launch: size(launch) == 1,
        size,
        f"use {flag} 1",
    )


RULES: tuple[Rule, ...] = (
    _only_one("--tensor-model-parallel-size", lambda launch: launch.tensor),
    _only_one("--pipeline-model-parallel-size", lambda launch: launch.pipeline),
    # megatron-core 0.16.1 does not sum expert gradients over tensor-parallel ranks at expert-tensor 1, without a word.
    _only_one("--expert-tensor-parallel-size", lambda launch: launch.expert_tensor),
    # DSA would need keys of all ranks; megatron-core's own is wrong there, without a word.
    _only_one("--context-parallel-size", lambda launch: launch.context),
    Rule(
        "--sequence-parallel needs tensor parallelism",
        lambda launch: not launch.sequence,
        lambda launch: "on",
        "leave it out",
    ),
    Rule(
        "--expert-model-parallel-size must be positive",
        lambda launch: launch.expert > 0,
        lambda launch: launch.expert,
        "1 keeps all experts on every rank",
    ),
    Rule(
        "the ranks must be a multiple of --expert-model-parallel-size",
        lambda launch: launch.ranks is None or launch.ranks % launch.expert == 0,
        lambda launch: f"{launch.ranks} ranks, {launch.expert}",
        "start as many with torchrun --nproc-per-node, or lower it",
    ),
    Rule(
        "--expert-model-parallel-size must divide the base's experts",
        lambda launch: launch.experts is None or launch.experts % launch.expert == 0,
        lambda launch: f"{launch.experts} experts, {launch.expert}",
        "use a divisor, for V2-Lite's 64 a power of two",
    ),
    # The gradient norm, and so the clipping, of a Muon over dense and expert matrices would miss the other ranks' experts.
    Rule(
        "--optimizer muon needs all experts on every rank",
        lambda launch: launch.optimizer != "muon" or launch.expert == 1,
        lambda launch: f"--expert-model-parallel-size {launch.expert}",
        "use adam, or --expert-model-parallel-size 1",
    ),
    Rule(
        "--optimizer muon needs whole matrices",
        lambda launch: launch.optimizer != "muon" or not launch.distributed_optimizer,
        lambda launch: "--use-distributed-optimizer",
        "leave one out",
    ),
    Rule(
        "--train base-indexers needs --expert-model-parallel-size 1: no other is proven equal in this release",
        lambda launch: launch.train != "base-indexers" or launch.expert == 1,
        lambda launch: launch.expert,
        "leave it out",
    ),
    Rule(
        "--distributed-timeout-minutes must be positive",
        lambda launch: launch.timeout_minutes > 0,
        lambda launch: launch.timeout_minutes,
        "30 is usual",
    ),
)


def check_layout(launch: Launch) -> None:
    """Raises UserError: the first rule that is broken."""
    for rule in RULES:
        if not rule.holds(launch):
            raise UserError(f"{rule.text}: {rule.values(launch)}; {rule.remedy}")
