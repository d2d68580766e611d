"""`dsa-upcycle <command>`: one dataclass a command, its docstring is the help, its `__call__` does the work.

A command's room is imported when the command runs: `--help` and mistakes answer at once, without torch.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron_patch import __version__, cli_parity, cli_prune, errors, flags
from megatron_patch.cli_machine import Doctor, Plan

PROG = "dsa-upcycle"


@dataclass
class DemoBase:
    """Train a small DeepSeek-V2-Lite-shaped base from text that comes with the package.

    It has every structural feature: dense first layer, shared and routed experts, plain query projection, YaRN.

    Writes a Hugging Face directory (model, tokenizer, chat template) and demo_data/ in it: text, chats and a suite of
    tasks with exact answers, everything that the next steps need.

    Example: dsa-upcycle demo-base --output runs/demo/base
    """

    output: Path
    """A new or empty directory."""
    fast: bool = False
    """A few steps only: proves the path, not the figures."""
    specialised_experts: bool = False
    """Experts that take tasks of their own, as large models have them: a base to prune (docs/prune.md)."""

    def __call__(self) -> int | None:
        from megatron_patch.demo.demo_base import run

        return run(self.output, fast=self.fast, specialised_experts=self.specialised_experts)


@dataclass
class Export:
    """Make one Hugging Face directory of a training checkpoint and its base.

    It carries the code that runs the DSA layers. The base's shards are copied byte for byte. A crash leaves no directory that loads.

    Example: dsa-upcycle export --checkpoint runs/demo/sft --base runs/demo/base --output runs/demo/export
    """

    checkpoint: Path
    """The --save directory of a training run."""
    base: Path
    """The base that it was trained on."""
    output: Path
    """A new or empty directory."""
    iteration: int | None = None
    """Which checkpoint; default: the latest."""
    layout: Literal["hybrid", "native"] = "hybrid"
    """hybrid: base layers as they are, DSA layers on top; native: every layer DSA, for inference engines and verl."""
    base_indexers: Path | None = None
    """For --layout native: the --save directory of a --train base-indexers run. Without it the base's indexers are neutral, and
    the export is right for contexts of at most --index-topk tokens."""
    base_shards: Literal["copy", "symlink"] = "copy"
    """symlink saves the space, and needs the base to stay where it is."""

    def __call__(self) -> int | None:
        from megatron_patch.checkpoint.export import export

        export(
            self.checkpoint,
            self.base,
            self.output,
            iteration=self.iteration,
            layout=self.layout,
            base_indexers=self.base_indexers,
            base_shards=self.base_shards,
        )
        return errors.EXIT_OK


@dataclass
class Check:
    """Is an export complete, unharmed and loadable?

    Compares it with its base, tensor by tensor. Exit code 2 if a check fails.

    Example: dsa-upcycle check runs/demo/export --base runs/demo/base
    """

    export: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="EXPORT")]
    """The directory that `dsa-upcycle export` wrote."""
    base: Path
    """The base that it was made from."""
    json: Path | None = None
    """Also write the result to this file."""

    def __call__(self) -> int | None:
        from megatron_patch.checkpoint.check import check

        return check(self.export, self.base, self.json)


@dataclass
class Evaluate:
    """Score a model against its base, with and without its DSA layers.

    Writes recovery.json, recovery.md and recovery.png: how much of each task is kept, and whether the DSA layers take
    part in it (scores with them bypassed, and with their selected keys scrambled). lm-eval scores; its tasks are written
    beside the report (lm_eval/), for its own command line. docs/evaluate.md explains.

    Example: dsa-upcycle evaluate --base runs/demo/base --model runs/demo/export
    --suite runs/demo/base/demo_data/suite --output runs/demo/evaluation
    """

    base: Path
    """The base's Hugging Face directory."""
    suite: Path
    """Folder with suite.json and its task files."""
    output: Path
    """A new or empty directory."""
    model: Path | None = None
    """The exported or pruned directory. Either this, --endpoint or --plan."""
    endpoint: str | None = None
    """Instead of --model, a served model: URL of an OpenAI-compatible completions server (vLLM, SGLang), without ablations."""
    endpoint_model: str | None = None
    """The name under which the endpoint serves it; default: the only one it lists."""
    plan: Path | None = None
    """Instead of --model, a dry run: a plan.json of `prune plan`; the base is scored with its dropped experts masked."""
    base_endpoint: str | None = None
    """With --kind prune, a served base: --base need hold its config and tokenizer only."""
    base_endpoint_model: str | None = None
    """The name under which that endpoint serves it; default: the only one it lists."""
    kind: Literal["upcycle", "prune"] = "upcycle"
    """What made the model out of the base. prune takes every family that prune knows, and no ablations."""
    limit: int | None = None
    """Score only the first N rows of each task."""
    trust_remote_code: bool = False
    """Let code in a model's directory run that is not this package's. What `export` wrote needs no trust."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations."""
    batch_size: int = 16
    """Rows scored at once."""
    seed: int = 0
    """Of the scrambled selection."""
    device: Literal["cpu", "cuda", "npu"] | None = None
    """Default: what is there."""

    def __call__(self) -> int | None:
        from megatron_patch.evaluation.evaluate import run

        return run(
            base=self.base,
            model=self.model,
            suite=self.suite,
            output=self.output,
            endpoint=self.endpoint,
            endpoint_model=self.endpoint_model,
            plan=self.plan,
            base_endpoint=self.base_endpoint,
            base_endpoint_model=self.base_endpoint_model,
            kind=self.kind,
            limit=self.limit,
            trust_remote_code=self.trust_remote_code,
            dtype=self.dtype,
            batch_size=self.batch_size,
            seed=self.seed,
            device=self.device,
        )


@dataclass
class RlReport:
    """Read the log of a verl run, draw its curves and name its symptoms.

    RUN is a console log, the JSONL of verl's file logger, TensorBoard events, a wandb offline run, or a directory with
    such. Writes report.md, curves.png and rl_report.json. Symptoms are a result, not an error: the exit code is 0.

    Example: dsa-upcycle rl-report logs/grpo --compare logs/grpo_other_machine --output runs/rl_report
    """

    log: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """A verl log, or a directory with one."""
    output: Path
    """A new or empty directory."""
    compare: Path | None = None
    """Another run's log: says of each symptom whether that run has it too."""
    json: Path | None = None
    """Also write rl_report.json to this file."""
    fail_on: tuple[str, ...] = ()
    """Ids of symptoms, or any: exit code 1 if one is found, or was named and could not be tested."""

    def __call__(self) -> int | None:
        from megatron_patch.diagnosis.rl_report import run

        return run(self.log, self.output, compare=self.compare, json_file=self.json, fail_on=self.fail_on)


COMMANDS = {
    "demo-base": DemoBase,
    "doctor": Doctor,
    "plan": Plan,
    "export": Export,
    "check": Check,
    "evaluate": Evaluate,
    "rl-report": RlReport,
}
GROUPS = {"parity": cli_parity, "prune": cli_prune}  # commands that have commands of their own


def usage() -> str:
    """The text of `dsa-upcycle --help`."""
    summaries = {name: command.__doc__.splitlines()[0] for name, command in COMMANDS.items()}
    summaries |= {name: group.SUMMARY for name, group in GROUPS.items()}
    return "\n".join(
        [
            f"{PROG} {__version__}: DeepSeek-V2-Lite with DSA layers, from a checkpoint to its scores",
            "",
            f"usage: {PROG} <command> [flags]        {PROG} <command> --help",
            "",
            *flags.command_rows(summaries),
            "",
            "Training itself is `torchrun pretrain_upcycle.py` and `torchrun sft_upcycle.py`; README.md shows the journey.",
        ]
    )


def dispatch(argv: Sequence[str]) -> int | None:
    """Run the command that `argv` names, and return its exit code.

    Raises:
        UserError: no such command or flag, or the command refuses its input.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return errors.EXIT_OK if argv else errors.EXIT_USER
    if argv[0] == "--version":
        print(__version__)
        return errors.EXIT_OK
    name, rest = argv[0], argv[1:]
    if name in GROUPS:
        return GROUPS[name].dispatch(rest)
    return flags.call_command(name, rest, COMMANDS, PROG, others=GROUPS)


def main() -> None:
    """Entry point of the `dsa-upcycle` script and of `python -m megatron_patch`."""
    errors.unwind_on_sigterm()
    sys.exit(errors.run(lambda: dispatch(sys.argv[1:])))
