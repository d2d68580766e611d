"""Settings of the training scripts: one dataclass a concern, a docstring a field (it is the flag's help text).

`megatron_patch.flags.parse` turns `TrainSettings` into flat flags with Megatron's spellings. Each class checks its own
values; `TrainSettings` checks what spans classes. A rule broken here is a `UserError` before anything is loaded.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_patch.errors import UserError
from megatron_patch.layout_rules import Launch, check_layout

PRETRAIN, SFT = "pretrain", "sft"
DSA_LAYERS, BASE_INDEXERS = "dsa", "base-indexers"  # what trains
MUON = "muon"


def _require(holds: bool, rule: str, value: object, remedy: str) -> None:
    if not holds:
        raise UserError(f"{rule}: {value}; {remedy}")


@dataclass
class ModelSettings:
    base_model: Path
    """Hugging Face directory of the base (DeepSeek-V2-Lite-Chat), read directly."""
    dsa_layers: int = 2
    """DSA layers appended on top of the base."""
    layer_pattern: str | None = None
    """The whole pattern instead of --dsa-layers, e.g. mla*27,dsa*2."""
    dsa_init: Literal["identity", "copy", "random"] = "identity"
    """identity: step 0 equals the base exactly; copy: the last layer as it is; random."""
    index_topk: int = 2048
    """Keys that each query attends to."""
    index_n_heads: int = 64
    """Heads of the lightning indexer; Ascend's kernels want 64."""
    index_head_dim: int = 128
    """Size of an index head; the kernels of vLLM, SGLang and Ascend want 128."""
    train: Literal["dsa", "base-indexers"] = "dsa"
    """dsa: the DSA layers. base-indexers: an indexer beside each layer of the base, from its attention; for the native
    layout. The base alone is built then: what stands on top of it does not reach its layers."""
    trust_remote_code: bool = False
    """Let code in the base's directory run (its tokenizer). Its model code never runs."""

    def __post_init__(self) -> None:
        _require(self.dsa_layers > 0, "--dsa-layers must be positive", self.dsa_layers, "without one nothing trains")
        alone = self.train == DSA_LAYERS or self.layer_pattern is None
        rule = "--train base-indexers builds the base alone, without --layer-pattern"
        _require(alone, rule, self.layer_pattern, "leave the pattern out")


@dataclass
class StartSettings:
    load: Path | None = None
    """Resume everything from this --save directory: weights, optimizer, schedule, RNG, data position."""
    pretrained_checkpoint: Path | None = None
    """Start from the weights of this --save directory, or of an export, only (SFT starts from pretraining so)."""

    def __post_init__(self) -> None:
        both = self.load is not None and self.pretrained_checkpoint is not None
        _require(not both, "--load and --pretrained-checkpoint exclude each other", "both given", "give one")


@dataclass
class DataSettings:
    data_path: tuple[str, ...]
    """Pretraining: a prefix, or weights and prefixes (0.3 P1 0.7 P2). SFT: the folder that prepare_sft.py wrote."""
    valid_data_path: tuple[str, ...] | None = None
    """Held-out data in the same form; without it, --split holds out a part of --data-path."""
    split: str = "95,5"
    """Shares of training and held-out data."""
    seq_length: int = 4096
    """Tokens of a sample."""
    isolate_documents: bool = True
    """No attention, DSA index or loss across documents."""
    epoch_rows: Literal["fresh", "same"] | None = None
    """Pretraining rows of later epochs. fresh: documents shuffled and cut anew; same: the first epoch's rows in another order,
    which is what --trunk-cache can keep. Default: same with --trunk-cache, else fresh. (SFT's rows are always the same.)"""
    num_workers: int = 0
    """Processes that read data beside each rank."""

    def __post_init__(self) -> None:
        _require(
            self.seq_length > 1, "--seq-length must be at least 2", self.seq_length, "V2-Lite's usual value is 4096"
        )
        _require(
            self.num_workers >= 0, "--num-workers must not be negative", self.num_workers, "0 reads in the rank itself"
        )
        _require(len(self.data_path) > 0, "--data-path needs a value", "none given", "see data/prepare_pretrain.py")


@dataclass
class StepSettings:
    train_iters: int
    """Optimizer steps in all (a resumed run goes on to this number)."""
    micro_batch_size: int = 1
    """Samples a rank takes through the model at once."""
    global_batch_size: int = 8
    """Samples of one optimizer step, over all ranks and micro-batches."""
    seed: int = 1234
    """Of the data order and of the new layers' random weights."""
    eval_interval: int = 100
    """Steps between evaluations on held-out data (also before the first step and after the last); 0: never."""
    eval_iters: int = 10
    """Global batches of one evaluation."""
    log_interval: int = 10
    """Steps between lines in metrics.jsonl; each line is the mean over them, index_recall the last step's."""
    exit_duration_in_mins: float | None = None
    """Save and leave with exit code 0 after this many minutes."""
    max_non_finite_steps: int = 5
    """Skipped steps in a row (non-finite loss or gradient) after which the run ends with exit code 3."""

    def __post_init__(self) -> None:
        for name in (
            "train_iters",
            "micro_batch_size",
            "global_batch_size",
            "eval_iters",
            "log_interval",
            "max_non_finite_steps",
        ):
            value = getattr(self, name)
            _require(value > 0, f"--{name.replace('_', '-')} must be positive", value, "give 1 or more")
        _require(
            self.eval_interval >= 0, "--eval-interval must not be negative", self.eval_interval, "0 never evaluates"
        )
        _require(0 <= self.seed < 2**32, "--seed must be from 0 to below 2**32", self.seed, "give another")
        minutes = self.exit_duration_in_mins
        _require(minutes is None or minutes >= 0, "--exit-duration-in-mins must be 0 or more", minutes, "leave it out")


@dataclass
class OptimizerSettings:
    optimizer: Literal["adam", "sgd", "muon"] = "adam"
    """adam is AdamW; muon takes Muon for matrices and AdamW for vectors, routers and indexers."""
    lr: float = 1e-4
    """Peak learning rate."""
    min_lr: float = 1e-5
    """Learning rate at the end of the decay."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up from 0."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    """How the rate falls from --lr to --min-lr over --train-iters."""
    weight_decay: float = 0.0
    """AdamW's, on matrices only."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    indexer_lr: float | None = None
    """Peak rate of the indexers alone (V3.2's warm-up: 1e-3); without it, --lr."""
    indexer_loss_coeff: float = 1.0
    """Weight of the indexers' KL loss. It reaches no other parameter, so it acts like a rate of theirs."""
    indexer_warmup_iters: int = 0
    """First steps with dense attention and dense KL, before selection starts; LM loss and KL are both on."""
    moe_aux_loss_coeff: float = 0.0
    """Load-balancing loss of the new layers' routers; the base's routers never move."""

    def __post_init__(self) -> None:
        rates = ("lr", "min_lr", "weight_decay", "clip_grad", "indexer_lr", "indexer_loss_coeff", "moe_aux_loss_coeff")
        for name in rates:
            value, rule = getattr(self, name), f"--{name.replace('_', '-')} must be finite and not negative"
            _require(value is None or 0 <= value < float("inf"), rule, value, "give 0 or more")
        _require(
            self.min_lr <= self.lr, "--min-lr must not exceed --lr", f"{self.min_lr} > {self.lr}", "lower --min-lr"
        )
        for name in ("lr_warmup_iters", "indexer_warmup_iters"):
            value = getattr(self, name)
            _require(value >= 0, f"--{name.replace('_', '-')} must not be negative", value, "give 0 or more")


@dataclass
class PrecisionSettings:
    bf16: bool = False
    """Parameters and activations in bfloat16, fp32 main weights and gradients. Off: fp32 throughout."""
    device: Literal["cpu", "cuda", "npu"] | None = None
    """Default: what is there."""
    dsa_backend: Literal["auto", "reference", "chunked", "sparse", "by-length", "npu"] = "auto"
    """Implementation of the DSA op: auto takes the device's best, and the choice is printed. reference is the
    definition, whose memory grows with the square of a document's length; chunked works through chunks of queries; sparse,
    for the CPU, computes selected pairs alone; by-length, the CPU's best, is sparse for packs with a document of more than
    256 tokens and chunked for others; npu the fused operators of Ascend."""
    recompute_dsa: bool = False
    """Keep the inputs of the DSA layers only, and compute the layers again in the backward pass: less memory, more time."""
    deterministic: bool = False
    """Only deterministic kernels; an operation without one is an error."""
    peak_tflops: float | None = None
    """Declared peak of one device in TFLOP/s, at the run's dtype: the log then shows the share reached (MFU)."""

    def __post_init__(self) -> None:
        elsewhere = self.dsa_backend == "npu" and self.device not in (None, "npu")
        _require(not elsewhere, "--dsa-backend npu runs on --device npu", self.device, "use --dsa-backend auto")
        peak = self.peak_tflops
        _require(peak is None or peak > 0, "--peak-tflops must be positive", peak, "give the device's data sheet's value")


@dataclass
class ParallelSettings:
    tensor_model_parallel_size: int = 1
    """Ranks that share each matrix."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: int = 1
    """Ranks that share each expert's matrices."""
    context_parallel_size: int = 1
    """Ranks that share each sequence."""
    sequence_parallel: bool = False
    """Split activations along the sequence where matrices are split."""
    use_distributed_optimizer: bool = False
    """Spread the optimizer's state over the ranks that hold the same parameters."""
    overlap_grad_reduce: bool = False
    """Sum gradients over the ranks while the backward pass of a step's last micro-batch goes on, instead of after it."""
    distributed_timeout_minutes: float = 30.0
    """How long a rank waits for the others before it ends."""

    def launch(self, **others: str | int | None) -> Launch:
        """What the layout's rules are asked about; `others` are `Launch`'s fields of other settings."""
        return Launch(
            tensor=self.tensor_model_parallel_size,
            pipeline=self.pipeline_model_parallel_size,
            expert=self.expert_model_parallel_size,
            expert_tensor=self.expert_tensor_parallel_size,
            context=self.context_parallel_size,
            sequence=self.sequence_parallel,
            distributed_optimizer=self.use_distributed_optimizer,
            timeout_minutes=self.distributed_timeout_minutes,
            **others,
        )


@dataclass
class OutputSettings:
    save: Path
    """Where checkpoints, metrics.jsonl, loss.png, config.json and frozen.sha256 go."""
    save_interval: int = 0
    """Steps between checkpoints; 0: only at the end."""
    keep_last: int = 0
    """Checkpoints to keep; 0: all."""
    async_save: bool = False
    """Write checkpoints while training goes on, from a copy in host memory of what trains and the optimizer's state."""
    tensorboard_dir: Path | None = None
    """Write TensorBoard event files here."""
    wandb_project: str | None = None
    """Log to this wandb project."""
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"
    """offline needs no account; upload later with `wandb sync`."""
    trunk_cache: Path | None = None
    """Keep the frozen trunk's output of each row in this directory, and take it from there when the row comes again: in a later
    epoch, after a resume, in another run on the same base and data. Takes the hidden size x 2 bytes a token; the size is said at the start."""
    trunk_cache_dtype: Literal["bf16", "fp32"] = "bf16"
    """Of the kept values. Training takes them rounded from the first epoch on; fp32 changes nothing of an fp32 run."""
    profile_steps: str | None = None
    """A:B prints where the time of these steps goes (data, trunk, DSA layers, head, optimizer), and writes that and a
    torch.profiler trace to --save."""

    def __post_init__(self) -> None:
        _require(
            self.save_interval >= 0, "--save-interval must not be negative", self.save_interval, "0 saves at the end"
        )
        _require(self.keep_last >= 0, "--keep-last must not be negative", self.keep_last, "0 keeps all")
        folder = self.tensorboard_dir
        _require(folder is None or not folder.is_file(), "--tensorboard-dir must be a directory", folder, "move the file")
        if self.profile_steps is not None:
            self.profile_range()

    def profile_range(self) -> tuple[int, int] | None:
        """(first, last) step to profile, both included, 1-based."""
        if self.profile_steps is None:
            return None
        first, _, last = self.profile_steps.partition(":")
        digits = (first + last).isascii() and first.isdigit() and last.isdigit()  # "²" is a digit, too, but no number
        valid = digits and 0 < int(first) <= int(last)
        _require(valid, "--profile-steps must be A:B with 1 <= A <= B", self.profile_steps, "e.g. 10:12")
        return int(first), int(last)


@dataclass
class TrainSettings:
    """All settings of a training run; the flags are flat."""

    model: ModelSettings
    data: DataSettings
    steps: StepSettings
    output: OutputSettings
    start: StartSettings = field(default_factory=StartSettings)
    optim: OptimizerSettings = field(default_factory=OptimizerSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)

    def __post_init__(self) -> None:
        warmup, iters = self.optim.lr_warmup_iters, self.steps.train_iters
        _require(warmup < iters, "--lr-warmup-iters must be below --train-iters", f"{warmup} >= {iters}", "lower it")
        check_layout(self.launch())
        if self.model.train == BASE_INDEXERS:
            kind, rule = self.optim.optimizer, "--train base-indexers needs --optimizer adam or sgd, muon takes no indexers"
            _require(kind != MUON, rule, kind, "use adam")
            _require(not self.precision.recompute_dsa, "--recompute-dsa needs DSA layers", "--train base-indexers", "leave it out")
            cache, rule = self.output.trunk_cache, "--trunk-cache keeps what lies below DSA layers, --train base-indexers has none"
            _require(cache is None, rule, cache, "leave it out")
        first, _ = self.output.profile_range() or (0, 0)
        _require(
            first <= iters, "--profile-steps must begin within --train-iters", f"{first} > {iters}", "lower it"
        )
        warmup = self.optim.indexer_warmup_iters
        _require(
            warmup <= iters, "--indexer-warmup-iters must not exceed --train-iters", f"{warmup} > {iters}", "lower it"
        )

    def launch(self, ranks: int | None = None, experts: int | None = None) -> Launch:
        """What the layout's rules are asked about; `ranks` and `experts` (of the base) where they are known."""
        return self.parallel.launch(optimizer=self.optim.optimizer, train=self.model.train, ranks=ranks, experts=experts)

    @property
    def repeats_rows(self) -> bool:
        """Whether pretraining takes the same rows in every epoch."""
        return (self.data.epoch_rows or ("same" if self.output.trunk_cache else "fresh")) == "same"

    @property
    def resumes_in_place(self) -> bool:
        """Whether --load names the run that --save goes on with."""
        return self.start.load is not None and self.start.load.resolve() == self.output.save.resolve()
