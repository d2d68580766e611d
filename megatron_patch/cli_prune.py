"""`dsa-upcycle prune <command>`: the commands of expert pruning, in the manner of `cli.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_patch import flags
from megatron_patch.errors import UserError

if TYPE_CHECKING:
    from megatron_patch.pruning.dry_run import DryRun

PROG = "dsa-upcycle prune"
SUMMARY = "Keep the experts that a task needs: observe, plan, apply, verify, report"


@dataclass
class Observe:
    """Count which experts a model chooses over data, and what they add to its output.

    Writes sums per MoE layer, expert and data source. Sums of parts add up: observe on many workers (--shard), then
    --merge. A run that was killed goes on with --resume. Or count what a rollout engine recorded: --from-routed-experts.

    Example: dsa-upcycle prune observe --model runs/demo/base --data runs/demo/base/demo_data/sft.jsonl --chat
    --output runs/demo/statistics.safetensors
    """

    output: Path
    """The statistics file to write (.safetensors)."""
    model: Path | None = None
    """The model's Hugging Face directory. Needed but for --merge."""
    data: tuple[Path, ...] = ()
    """Files of JSON lines; each is a source."""
    source: tuple[str, ...] = ()
    """A name for each file; default: the file's own."""
    text_key: str = "text"
    """Key of a row's text."""
    chat: bool = False
    """Rows are {"messages": [...]} and go through the chat template."""
    max_length: int = 2048
    """Most tokens of a row; longer ones are cut."""
    generate: int = 0
    """Also let the model continue each row by up to so many tokens (greedy), and observe those too."""
    batch_size: int = 8
    """Rows of a forward pass."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; auto: the checkpoint's."""
    device: Literal["cpu", "cuda", "npu", "auto"] | None = None
    """auto spreads the model over all devices. Default: CUDA where there is a GPU, else the CPU."""
    shard: str = "0/1"
    """I/N: take every N-th row from row I, for N workers on the same data."""
    save_interval: int = 50
    """Batches between two saves of the unfinished statistics: what a killed run loses at most."""
    resume: bool = False
    """Go on with the run that was killed."""
    from_routed_experts: tuple[Path, ...] = ()
    """Files of expert ids that an engine recorded (.npz, .npy, .parquet, .jsonl; docs/prune_observe.md), instead of --data."""
    merge: tuple[Path, ...] = ()
    """Statistics files to add up, instead of observing."""

    def __call__(self) -> int | None:
        ways = [flag for flag in ("data", "from_routed_experts", "merge") if getattr(self, flag)]
        named = [f"--{flag.replace('_', '-')}" for flag in ways]
        if len(ways) != 1:
            raise UserError(
                f"give one of --data, --from-routed-experts and --merge: {' and '.join(named) or 'none'} was given; see "
                f"{PROG} observe --help"
            )
        if (self.model is None) != (ways == ["merge"]):
            raise UserError(
                f"{named[0]} {'needs a' if self.model is None else 'reads no'} --model: "
                f"{'none was given; add it' if self.model is None else f'{self.model} was given; leave it out'}"
            )
        return getattr(self, f"_{ways[0]}")()

    def _merge(self) -> int:
        from megatron_patch.pruning import observe

        return observe.run_merge(self.merge, self.output)

    def _from_routed_experts(self) -> int:
        from megatron_patch.pruning import routed_experts

        return routed_experts.run(self.model, list(self.from_routed_experts), self.output, self.source)

    def _data(self) -> int:
        from megatron_patch.pruning import observe

        settings = observe.Settings(
            model=self.model,
            data=observe.sources_of(self.data, self.source),
            text_key=self.text_key,
            chat=self.chat,
            max_length=self.max_length,
            shard=observe.parse_shard(self.shard),
            batch_size=self.batch_size,
            generate=self.generate,
            dtype=self.dtype,
            device=self.device,
            save_interval=self.save_interval,
        )
        return observe.run(settings, self.output, resume=self.resume)


@dataclass
class Plan:
    """Choose the experts to keep: feasibility first, then scores, then what it costs and saves.

    Without --check-only it needs the statistics of `prune observe`, and writes plan.json. --dry-run says what the plan does
    to a text, by masking the model; `dsa-upcycle evaluate --kind prune --plan` does the same with a suite of tasks.

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
    dry_run: Path | None = None
    """Also load the model, and print loss and perplexity of this file of JSON lines, whole and masked as planned, and the KL."""
    text_key: str = "text"
    """Of --dry-run: key of a row's text."""
    chat: bool = False
    """Of --dry-run: rows are {"messages": [...]} and go through the chat template."""
    max_length: int = 2048
    """Of --dry-run: most tokens of a row; longer ones are cut."""
    batch_size: int = 8
    """Of --dry-run: rows of a forward pass."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of --dry-run: weights and activations; auto: the checkpoint's."""
    device: Literal["cpu", "cuda", "npu", "auto"] | None = None
    """Of --dry-run: auto spreads the model over all devices. Default: CUDA where there is a GPU, else the CPU."""

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
        from megatron_patch.pruning import plan

        return plan.run(
            self.model,
            wish,
            stats=self.stats,
            output=self.output,
            device_memory_gb=self.device_memory_gb,
            dry=self._dry_run(),
        )

    def _dry_run(self) -> "DryRun | None":
        names = ("text_key", "chat", "max_length", "batch_size", "dtype", "device")
        given = {name: value for name in names if (value := getattr(self, name)) != getattr(Plan, name)}
        if self.dry_run is None:
            if given:
                flag = next(iter(given)).replace("_", "-")
                raise UserError(f"--{flag} is of a --dry-run: none was asked for; add --dry-run FILE, or leave it out")
            return None
        from megatron_patch.pruning.dry_run import DryRun

        return DryRun(self.dry_run, **given)


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


@dataclass
class Report:
    """Draw which experts are used, what part of the traffic n of them take, and what a plan keeps.

    Writes report.md, heatmap.png (layer x expert) and coverage.png.

    Example: dsa-upcycle prune report --stats runs/demo/statistics.safetensors --output runs/demo/pruning_report
    """

    stats: Path
    """What `prune observe` wrote."""
    output: Path
    """A new or empty directory."""
    plan: Path | None = None
    """A plan.json of `prune plan`, to show what it keeps."""

    def __call__(self) -> int | None:
        from megatron_patch.pruning import report

        return report.run(self.stats, self.output, self.plan)


COMMANDS = {"observe": Observe, "plan": Plan, "apply": Apply, "verify": Verify, "report": Report}


def dispatch(argv: Sequence[str]) -> int | None:
    """See `flags.call_group`."""
    return flags.call_group(argv, COMMANDS, PROG)
