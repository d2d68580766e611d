"""Simulated verl runs, healthy and ill, and writers of verl's log formats.

A healthy run is drawn wide on purpose: reward curves of several shapes, noise with memory, heavy-tailed gradients, growing
answers, validation steps that take long. What a detector must not call ill has to be in here.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

Rows = dict[int, dict[str, float]]


def _noise(rng: np.random.Generator, n: int, sigma: float) -> np.ndarray:
    """Noise of standard deviation `sigma` in which a step may remember half of the one before."""
    memory = rng.uniform(0, 0.5)
    steps = rng.normal(0, sigma * math.sqrt(1 - memory**2), n)
    for i in range(1, n):
        steps[i] += memory * steps[i - 1]
    return steps


def _rise(rng: np.random.Generator, n: int) -> np.ndarray:
    """From 0 to 1: straight, saturating or sigmoid."""
    t = np.linspace(0, 1, n)
    shape = rng.integers(3)
    if shape == 0:
        return t
    if shape == 1:
        return 1 - np.exp(-t / rng.uniform(0.1, 0.5))
    return 1 / (1 + np.exp(-(t - rng.uniform(0.3, 0.6)) / rng.uniform(0.05, 0.15)))


def healthy(seed: int, n: int | None = None, *, old_names: bool = False) -> Rows:
    """A run that learns, as verl logs it: step 0 is validation alone, then `n` steps (default: 40 to 400)."""
    rng = np.random.default_rng(seed)
    n = n or int(rng.integers(40, 401))
    t = np.linspace(0, 1, n)
    gain, sigma = rng.uniform(0.25, 0.6), rng.uniform(0.005, 0.03)
    reward = np.clip(rng.uniform(0.02, 0.35) + gain * _rise(rng, n) + _noise(rng, n, sigma), 0, 1)
    growth = min(rng.uniform(0.6, 3.5), 1.7 ** (n / 30))  # by at most 1.7 within 30 steps
    length = rng.uniform(100, 3000) * growth**t * np.exp(_noise(rng, n, rng.uniform(0.02, 0.08)))
    entropy = rng.uniform(0.1, 1.2) * rng.uniform(0.25, 1.2) ** t * np.exp(_noise(rng, n, rng.uniform(0.02, 0.08)))
    grad = rng.uniform(0.05, 2) * rng.uniform(0.1, 1.5) ** t * np.exp(_noise(rng, n, rng.uniform(0.1, 0.5)))
    grad[rng.random(n) < 0.01] *= rng.uniform(3, 8)  # a spike now and then
    diff = rng.uniform(0.001, 0.006) * rng.uniform(0.8, 1.25) ** t * np.exp(_noise(rng, n, rng.uniform(0.02, 0.15)))
    clip = np.clip(rng.uniform(0, 0.15) + _noise(rng, n, 0.02), 0, 1)
    seconds = rng.uniform(5, 600) * rng.uniform(0.8, 1.8) ** t * np.exp(_noise(rng, n, rng.uniform(0.02, 0.15)))
    seconds[0] *= rng.uniform(1, 6)  # compiles
    testing = np.where(np.arange(1, n + 1) % rng.integers(5, 21) == 0, seconds.mean() * rng.uniform(0.5, 8), 0.0)
    rows: Rows = {0: {"val-core/openai/gsm8k/acc/mean@1": float(reward[0])}}
    for i in range(n):
        rows[i + 1] = {
            "global_seqlen/mean": float(4 * length[i]),
            "actor/entropy_loss" if old_names else "actor/entropy": float(entropy[i]),
            "actor/kl_loss": float(0.05 * t[i] * abs(1 + rng.normal(0, 0.1))),
            "actor/pg_clipfrac": 0.001,
            "actor/ppo_kl": float(rng.normal(0, 1e-5)),
            "actor/grad_norm": float(grad[i]),
            "actor/lr": 1e-06,
            "training/global_step": float(i + 1),
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_max": float(min(1, 60 * diff[i])),
            "training/rollout_probs_diff_mean": float(diff[i]),
            "training/rollout_probs_diff_std": float(3 * diff[i]),
            "training/rollout_actor_probs_pearson_corr": 0.999,
            "critic/score/mean": float(reward[i]),
            "critic/score/max": 1.0,
            "critic/score/min": 0.0,
            "critic/rewards/mean": float(reward[i]),
            "response_length/mean": float(length[i]),
            "response_length/clip_ratio": float(clip[i]),
            "timing_s/gen": float(0.6 * seconds[i]),
            "timing_s/step": float(seconds[i] + testing[i]),
            "perf/time_per_step": float(seconds[i] + testing[i]),
        }
        if testing[i]:
            rows[i + 1] |= {"timing_s/testing": float(testing[i]), "val-core/openai/gsm8k/acc/mean@1": float(reward[i])}
        if old_names:
            rows[i + 1].pop("training/rollout_actor_probs_pearson_corr")
    return rows


# --- faults ----------------------------------------------------------------------------------------------------------------


def _put(rows: Rows, values: Callable[[int, float, float], float], *metrics: str) -> None:
    """Replace metrics by values(index of the step, place of the step in 0..1, old value)."""
    steps = [step for step in rows if step > 0]
    for i, step in enumerate(steps):
        for metric in metrics:
            rows[step][metric] = float(values(i, i / (len(steps) - 1), rows[step][metric]))


_REWARD = ("critic/rewards/mean", "critic/score/mean")


def _series(rows: Rows, rng: np.random.Generator, values: Callable[[np.ndarray], np.ndarray], sigma: float) -> None:
    n = len(rows) - 1
    series = values(np.arange(n)) + rng.normal(0, sigma, n)
    _put(rows, lambda i, t, old: float(np.clip(series[i], 0, 1)), *_REWARD)


def plant_non_finite(rows: Rows, rng: np.random.Generator) -> None:
    bad = int(rng.integers(2, len(rows) - 1))
    metric = ["actor/grad_norm", "critic/rewards/mean", "training/rollout_probs_diff_mean"][rng.integers(3)]
    rows[bad][metric] = [math.nan, math.inf][rng.integers(2)]


def plant_grad_norm_start(rows: Rows, rng: np.random.Generator) -> None:
    """The reference case: 100 to 500 in the first steps on one framework."""
    for step in range(1, int(rng.integers(2, 12)) + 1):
        rows[step]["actor/grad_norm"] = float(rng.uniform(100, 500))


def plant_mismatch(rows: Rows, rng: np.random.Generator) -> None:
    level = rng.uniform(0.012, 0.2)
    _put(rows, lambda i, t, old: level * math.exp(rng.normal(0, 0.1)), "training/rollout_probs_diff_mean")


def plant_mismatch_drift(rows: Rows, rng: np.random.Generator) -> None:
    factor = rng.uniform(3, 8)
    _put(
        rows,
        lambda i, t, old: 0.001 * factor**t * math.exp(rng.normal(0, 0.1)),
        "training/rollout_probs_diff_mean",
    )


def plant_reward_flat(rows: Rows, rng: np.random.Generator) -> None:
    level = rng.uniform(0, 0.6)
    _series(rows, rng, lambda i: np.full(len(i), level), rng.choice([0.0, 0.01, 0.05]))


def plant_reward_fall(rows: Rows, rng: np.random.Generator) -> None:
    """It learns for a while, then breaks: verl issues 747 and 2626."""
    at = rng.uniform(0.4, 0.7) * len(rows)
    _series(rows, rng, lambda i: np.where(i < at, 0.2 + 0.4 * i / at, 0.05), 0.02)


def plant_reward_oscillating(rows: Rows, rng: np.random.Generator) -> None:
    n = len(rows) - 1
    period = rng.uniform(6, n / 4)
    size = rng.uniform(0.1, 0.25)
    _series(rows, rng, lambda i: 0.4 + 0.1 * i / n + size * np.sin(2 * np.pi * i / period), size / 6)


def plant_entropy_collapse(rows: Rows, rng: np.random.Generator) -> None:
    start, speed = rng.uniform(0.2, 1), rng.uniform(5, 12)
    _put(rows, lambda i, t, old: start * math.exp(-speed * t) * math.exp(rng.normal(0, 0.1)), "actor/entropy")


def plant_length_explosion(rows: Rows, rng: np.random.Generator) -> None:
    at, factor = rng.uniform(0.2, 0.7) * len(rows), rng.uniform(5, 10)
    width = rng.uniform(1, 8)
    _put(rows, lambda i, t, old: old * (1 + factor / (1 + math.exp(-(i - at) / width))), "response_length/mean")


def plant_clip_ratio(rows: Rows, rng: np.random.Generator) -> None:
    at = rng.uniform(0.1, 0.7)
    _put(rows, lambda i, t, old: rng.uniform(0.6, 1) if t > at else old, "response_length/clip_ratio")


def plant_step_time(rows: Rows, rng: np.random.Generator) -> None:
    for step in rng.choice(np.arange(6, len(rows) - 1), int(rng.integers(2, 6)), replace=False):
        wait = rows[step]["timing_s/step"] * rng.uniform(6, 20)
        rows[step]["timing_s/step"] += wait
        rows[step]["perf/time_per_step"] += wait


FAULTS = {name.removeprefix("plant_"): each for name, each in globals().items() if name.startswith("plant_")}


def ill(fault: str, seed: int) -> Rows:
    """A healthy run of 80 to 300 steps with one fault."""
    rng = np.random.default_rng(10_000 + seed)
    rows = healthy(seed, int(rng.integers(80, 301)))
    FAULTS[fault](rows, rng)
    return rows


# --- formats ---------------------------------------------------------------------------------------------------------------


def console_line(step: int, values: dict[str, float], style: str = "plain") -> str:
    """`old`: three decimals, verl until mid-2025. `plain`: all digits. `numpy`: numpy 2 shows the type, for the actor's."""

    def text(name: str, value: float) -> str:
        if style == "old":
            return f"{value:.3f}"
        return f"np.float64({value!r})" if style == "numpy" and name.startswith("actor/") else repr(value)

    return " - ".join([f"step:{step}", *(f"{name}:{text(name, value)}" for name, value in values.items())])


def write_console(path: Path, rows: Rows, style: str = "plain", ray: bool = True) -> Path:
    """A console log: Ray's coloured prefix, a configuration, a progress bar that redraws itself and sticks to lines."""
    prefix = "\x1b[36m(TaskRunner pid=4242, ip=10.0.0.7)\x1b[0m " if ray else ""
    bar = "Training Progress:  {0}%|█▊   | {0}/100 [1:02:03<4:05, 33.10s/it]"
    text = [f"{prefix}{{'trainer': {{'total_epochs': 15, 'note': 'step: none'}}}}\n"]
    for i, (step, values) in enumerate(rows.items()):
        line = console_line(step, values, style)
        if i % 3 == 0:  # the bar is drawn before the line, with no line end of its own
            text.append(f"{prefix}{bar.format(i)}\r{prefix}{line}\n")
        elif i % 3 == 1:  # ... or behind it
            text.append(f"{prefix}{line}{bar.format(i)}\n")
        else:
            text.append(f"{prefix}{line}\x1b[32m [repeated 2x across cluster]\x1b[0m\n")
        text.append("(WorkerDict pid=4300) INFO step time is fine\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(text), encoding="utf-8", newline="")
    return path


def write_jsonl(path: Path, rows: Rows) -> Path:
    """verl's file logger: orjson writes what is not finite as null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for step, values in rows.items():
            data = {name: value if math.isfinite(value) else None for name, value in values.items()}
            file.write(json.dumps({"step": step, "data": data}) + "\n")
    return path


def write_tensorboard(folder: Path, rows: Rows, started: int = 1_760_000_000) -> Path:
    """An event file as SummaryWriter.add_scalar makes it: one event a value. Without torch, which takes long to import."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"events.out.tfevents.{started}.host.1.0"
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=started, file_version="brain.Event:2").SerializeToString())
        for step, values in rows.items():
            for name, value in values.items():
                summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
                writer.write(Event(wall_time=started + step, step=step, summary=summary).SerializeToString())
    return path


def write_wandb(folder: Path, rows: Rows) -> Path:
    """wandb itself, offline."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project="verl", mode="offline", dir=str(folder), settings=wandb.Settings(silent=True, x_disable_stats=True)
    )
    for step, values in rows.items():
        run.log(values, step=step)
    run.finish()
    wandb.teardown()  # its service writes on for a while after finish
    return next(folder.rglob("run-*.wandb"))
