"""`dsa-upcycle prune <command>`: the commands of expert pruning, in the manner of `cli.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_patch import errors, flags
from megatron_patch.errors import UserError

PROG = "dsa-upcycle prune"
SUMMARY = "Keep the experts that a task needs: plan, apply, verify"


@dataclass
class Plan:
    """Choose the experts to keep: feasibility first, then scores, then what it costs and saves.

    Without --check-only it needs the statistics of `prune observe`, and writes plan.json.

    Example: dsa-upcycle prune plan --model DeepSeek-V3.2 --stats stats.safetensors --keep 128 --output plan.json
    """

    model: Path
    """The model's Hugging Face directory: DeepSeek-V2(-Lite), V3, V3.2, V4-Flash, or an upcycled export."""
    keep: int
    """Experts of each layer to keep; one number for all layers, since config.json has one."""
    stats: Path | None = None
    """What `prune observe` wrote. Keeping all experts needs none."""
    output: Path | None = None
    """The plan to write."""
    criterion: Literal["frequency", "gate_sum", "reap"] = "frequency"
    """frequency: times chosen. gate_sum: sum of routing weights. reap: mean of weight times the norm of the expert's output."""
    source_weights: tuple[str, ...] = ()
    """SOURCE=WEIGHT ...: how many times each data source counts; one that is not named counts once, weight 0 leaves it out."""
    protect: tuple[str, ...] = ()
    """LAYER:ID,ID ... or all:ID: experts that stay whatever their score."""
    groups: Literal["keep", "flatten"] = "keep"
    """keep: the same number in every group. flatten: one group, which routes otherwise than the source."""
    mtp: Literal["drop", "scores"] = "drop"
    """drop the MTP layers (transformers never runs them), or prune them by their own scores."""
    target: Literal["any", "ascend"] = "any"
    """ascend: needs --ep, and warns of what is known not to run there."""
    ep: int | None = None
    """Expert parallel size of the target: must divide --keep."""
    routed_scaling_factor: float | None = None
    """A correction of the routed weights' scale, written to config.json. `prune verify` prints their mass before and after."""
    check_only: bool = False
    """Only say whether --keep is feasible, from config.json alone."""
    device_memory_gb: float | None = None
    """Also say how many devices of so many 1e9 bytes the weights need."""

    def __call__(self) -> int | None:
        from megatron_patch.pruning.wish import Wish, check_only

        wish = Wish(
            keep=self.keep,
            criterion=self.criterion,
            source_weights=self.source_weights,
            protect=self.protect,
            groups=self.groups,
            mtp=self.mtp,
            target=self.target,
            ep=self.ep,
            routed_scaling_factor=self.routed_scaling_factor,
        )
        if self.check_only:
            return check_only(self.model, wish)
        from megatron_patch.pruning.plan import run

        return run(self.model, wish, stats=self.stats, output=self.output, device_memory_gb=self.device_memory_gb)


@dataclass
class Apply:
    """Write the pruned checkpoint: bytes of what stays, under new numbers, with a new index and config.

    Quantised weights are copied, never converted. A run that was killed goes on with --resume.

    Example: dsa-upcycle prune apply --model DeepSeek-V3.2 --plan plan.json --output DeepSeek-V3.2-128
    """

    model: Path
    """The source's directory; it is only read."""
    plan: Path
    """What `prune plan` wrote for it."""
    output: Path
    """A new or empty directory."""
    resume: bool = False
    """Go on with a run of the same plan that was stopped."""

    def __call__(self) -> int | None:
        from megatron_patch.pruning.apply import run

        return run(self.model, self.plan, self.output, resume=self.resume)


@dataclass
class Verify:
    """Is a pruned checkpoint what its plan says?

    Compares it with its source, tensor by tensor, and runs both where that is possible. Exit code 2 if a check fails.

    Example: dsa-upcycle prune verify --model DeepSeek-V3.2 --pruned DeepSeek-V3.2-128 --plan plan.json
    """

    model: Path
    """The source's directory."""
    pruned: Path
    """What `prune apply` wrote."""
    plan: Path
    """The plan that it was written by."""
    json: Path | None = None
    """Also write the result to this file."""
    logits: bool = True
    """Run both models in fp32 on the CPU; the source with its dropped experts forbidden."""
    max_model_gb: float = 8.0
    """The largest source to run, in 1e9 bytes of fp32."""

    def __call__(self) -> int | None:
        from megatron_patch.pruning.verify import run

        return run(
            self.model,
            self.pruned,
            self.plan,
            json_file=self.json,
            logits=self.logits,
            max_model_gb=self.max_model_gb,
        )


COMMANDS = {"plan": Plan, "apply": Apply, "verify": Verify}


def usage() -> str:
    """The text of `dsa-upcycle prune --help`."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {command.__doc__.splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join([f"usage: {PROG} <command> [flags]        {PROG} <command> --help", "", *rows])


def dispatch(argv: Sequence[str]) -> int | None:
    """Run the command that `argv` names, and return its exit code.

    Raises:
        UserError: no such command or flag, or the command refuses its input.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return errors.EXIT_OK if argv else errors.EXIT_USER
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        raise UserError(
            f"unknown command prune {name}; {flags.did_you_mean(name, COMMANDS)}commands: {', '.join(COMMANDS)}"
        )
    return flags.parse(COMMANDS[name], rest, f"{PROG} {name}")()
