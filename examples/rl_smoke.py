"""Can RL run on the proxy? GRPO (TRL) on the CPU trains an export of the demo on a task with exact answers.

The task is one step beyond what the model was taught: the largest of *five* numbers, where it knows the larger of two. The
reward is 1 for the exact answer, else 0. Rollout and trainer are the same weights in one process; `--fault ID` plants a known
fault (megatron_patch/faults.py) in the rollouts alone, as an engine with other numerics would have it.

    python examples/rl_smoke.py --export runs/quickstart/export --output runs/rl_smoke
"""

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megatron_patch import errors
from megatron_patch.diagnosis.parity.planted import PLANTS, planted
from megatron_patch.errors import EXIT_OK, UserError
from megatron_patch.evaluation.loading import inspect_directory, load_model
from megatron_patch.faults import Fault
from megatron_patch.io.publish import atomic_directory, atomic_write_json, require_empty

INSTRUCTION = "Say the larger number."
NUMBERS = 5
ANSWER_TOKENS = 6
SCORED_PROMPTS = 48
SAMPLES = 8


@dataclass
class Arguments:
    export: Path
    """The Hugging Face directory to train: the quickstart's export."""
    output: Path
    """A new or empty directory: rl_smoke.json, reward.png."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """One run each."""
    steps: int = 40
    """Optimizer steps of a run."""
    prompts: int = 8
    """Prompts a step; each is answered by a group of --samples."""
    samples: int = SAMPLES
    """Answers to a prompt: a group, whose mean reward is the baseline."""
    learning_rate: float = 2e-4
    """AdamW's, constant."""
    fault: str | None = None
    """Plant this known fault in the rollouts, not in the trainer."""


@dataclass
class Result:
    """One run. `start`, `end`: mean reward of sampled answers to prompts that are never trained on, as rollouts sample them."""

    seed: int
    start: float
    end: float
    gain: float
    rewards: list[float]
    grad_norms: list[float]
    seconds: float


def rows(rng: random.Random, count: int) -> list[dict]:
    """`prompt` (messages) and `answer` of `count` instances."""
    found = []
    for _ in range(count):
        numbers = rng.sample(range(10, 100), NUMBERS)
        messages = [
            {"role": "user", "content": INSTRUCTION},
            {"role": "assistant", "content": "Ready"},
            {"role": "user", "content": " ".join(map(str, numbers))},
        ]
        found.append({"prompt": messages, "answer": str(max(numbers))})
    return found


def exact(completions, answer, **_unused) -> list[float]:
    """TRL's reward function: 1 where the whole answer is right."""
    return [float(each[0]["content"].strip() == right) for each, right in zip(completions, answer, strict=True)]


class RolloutTrainer(GRPOTrainer):
    """GRPOTrainer whose rollouts may run with a fault that its gradients do not have."""

    fault: Fault | None = None

    def _generate_single_turn(self, *args, **kwargs):
        with _with_fault(self.model, self.fault):
            return super()._generate_single_turn(*args, **kwargs)


class Bar(TrainerCallback):
    """A progress bar with the mean reward, in place of a dictionary a step."""

    def __init__(self, label: str):
        self.bar = tqdm(desc=label, unit="step", mininterval=1.0)

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar.reset(state.max_steps)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in (logs or {}):
            self.bar.set_postfix(reward=f"{logs['reward']:.3f}", refresh=False)

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update()

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


@contextlib.contextmanager
def _with_fault(model: torch.nn.Module, fault: Fault | None) -> Iterator[None]:
    with planted(model, fault) if fault is not None else contextlib.nullcontext():
        yield


@torch.no_grad()
def mean_reward(model: torch.nn.Module, tokenizer, fault: Fault | None) -> float:
    """Of sampled answers to fixed prompts, temperature 1."""
    model.eval()
    torch.manual_seed(0)
    right = 0.0
    for row in rows(random.Random(0), SCORED_PROMPTS):
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"].expand(SAMPLES, -1)
        with _with_fault(model, fault):
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=ANSWER_TOKENS,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        answers = tokenizer.batch_decode(out[:, ids.size(1) :], skip_special_tokens=True)
        right += sum(answer.strip() == row["answer"] for answer in answers) / SAMPLES
    return right / SCORED_PROMPTS


def train(arguments: Arguments, seed: int, fault: Fault | None, folder: Path) -> Result:
    """One run from the export's weights."""
    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(arguments.export)
    model = load_model(inspect_directory(arguments.export))
    start = mean_reward(model, tokenizer, fault)
    config = GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        use_cpu=True,
        bf16=False,
        use_vllm=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=arguments.prompts * arguments.samples,
        num_generations=arguments.samples,
        max_completion_length=ANSWER_TOKENS,
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        remove_unused_columns=False,
    )
    trainer = RolloutTrainer(
        model=model,
        reward_funcs=exact,
        args=config,
        train_dataset=Dataset.from_list(rows(random.Random(seed), arguments.prompts * arguments.steps)),
        processing_class=tokenizer,
    )
    trainer.fault = fault
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Bar(f"seed {seed}"))
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    end = mean_reward(model, tokenizer, fault)
    return Result(
        seed=seed,
        start=start,
        end=end,
        gain=end - start,
        rewards=[entry["reward"] for entry in log],
        grad_norms=[float(entry["grad_norm"]) for entry in log],
        seconds=time.monotonic() - started,
    )


def run(arguments: Arguments) -> int:
    """Train every seed and publish what happened.

    Raises:
        UserError: an unknown fault, or an export that cannot be loaded.
    """
    require_empty(arguments.output)
    fault = None
    if arguments.fault is not None:
        known = sorted(PLANTS)
        if arguments.fault not in known:
            raise UserError(f"--fault must be one that a rollout can have: {arguments.fault!r} is not of {', '.join(known)}")
        fault = Fault(arguments.fault)
    with atomic_directory(arguments.output) as folder, tempfile.TemporaryDirectory() as scratch:
        results = []
        for seed in arguments.seeds:
            results.append(train(arguments, seed, fault, Path(scratch)))
            print(f"seed {seed}: reward {results[-1].start:.3f} -> {results[-1].end:.3f} in {results[-1].seconds:.0f} s", flush=True)
        content = {"schema": 1, "export": str(arguments.export), "fault": arguments.fault, "steps": arguments.steps}
        atomic_write_json(folder / "rl_smoke.json", content | {"runs": [asdict(each) for each in results]})
        draw(results, folder / "reward.png")
    report(results)
    print(f"written: {arguments.output / 'rl_smoke.json'}")
    return EXIT_OK


def report(results: list[Result]) -> None:
    """A table of the runs."""
    table = Table(title="GRPO on the export")
    for column in ("seed", "reward at the start", "at the end", "gain", "median grad_norm", "s"):
        table.add_column(column, justify="right")
    for each in results:
        norm = statistics.median(each.grad_norms) if each.grad_norms else float("nan")
        table.add_row(
            str(each.seed), f"{each.start:.3f}", f"{each.end:.3f}", f"{each.gain:+.3f}", f"{norm:.2f}", f"{each.seconds:.0f}"
        )
    Console().print(table)


def draw(results: list[Result], path: Path) -> None:
    """Mean reward of the rollouts, step by step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for each in results:
        axes.plot(each.rewards, label=f"seed {each.seed}")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward of the rollouts")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    raise SystemExit(errors.run(lambda: run(tyro.cli(Arguments, description=__doc__))))
