"""Where a run's numbers go: metrics.jsonl, TensorBoard, wandb, loss.png. Rank 0 only."""

import json
import math
import secrets
import sys
from pathlib import Path

from megatron_patch.config import OutputSettings
from megatron_patch.errors import UserError
from megatron_patch.io.publish import atomic_write_text
from megatron_patch.io.strict_json import parse_json

METRICS, PLOT, WANDB_ID = "metrics.jsonl", "loss.png", "wandb_run_id"
# One row of metrics.jsonl, as interface fixes it; a value that a kind does not have is null.
FIELDS = (
    "kind",
    "iteration",
    "consumed_samples",
    "consumed_tokens",
    "lm_loss",
    "indexer_kl",
    "index_recall",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "step_seconds",
    "peak_memory_mb",
    "skipped",
)


def read_metrics(save: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl; none if there is no such file.

    A last line that is not whole (the machine failed while it was written) is left out with a note.

    Raises:
        UserError: another line is no row.
    """
    file = save / METRICS
    lines = file.read_bytes().splitlines() if file.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line.decode("utf-8"))
            _ = row["iteration"] + 0
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise UserError(f"{file}:{number}: no row of metrics ({error}); remove the line") from None
            print(f"note: {file}:{number} is not whole and is left out", file=sys.stderr)
        else:
            rows.append(row)
    return rows


class MetricsWriter:
    """Appends rows and forwards them.

    Args:
        settings: of the output.
        config: the run's settings, for wandb.
        resume_at: rows past this iteration are removed: the run will write them again.
    """

    def __init__(self, settings: OutputSettings, config: dict, resume_at: int | None):
        self.save = settings.save
        self.save.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(self.save) if resume_at is not None and row["iteration"] <= resume_at]
        atomic_write_text(self.save / METRICS, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = (self.save / METRICS).open("a")
        self._tensorboard = self._wandb = None
        if settings.tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            purge = None if resume_at is None else resume_at + 1  # the first step that is hidden
            self._tensorboard = SummaryWriter(str(settings.tensorboard_dir), purge_step=purge)
        if settings.wandb_project is not None and settings.wandb_mode != "disabled":
            self._wandb = self._start_wandb(settings, config)

    def _start_wandb(self, settings: OutputSettings, config: dict):
        """A wandb run under --save; a resumed run goes on with the same one."""
        import wandb

        file = self.save / WANDB_ID
        run_id = file.read_text().strip() if file.exists() else secrets.token_hex(4)
        atomic_write_text(file, run_id + "\n")
        return wandb.init(
            project=settings.wandb_project,
            id=run_id,
            resume="allow",
            mode=settings.wandb_mode,
            dir=str(self.save),
            config=config,
            settings=wandb.Settings(silent=True),
        )

    def write(self, kind: str, **values) -> None:
        """Add a row; fields of `FIELDS` that are not given are null, further ones are kept, non-finite is null."""
        row = {name: values.pop(name, None) for name in FIELDS if name != "kind"}
        row = {"kind": kind, **row, **values}
        row = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        numbers = {
            f"{kind}/{name}": value
            for name, value in row.items()
            if name not in ("kind", "iteration") and isinstance(value, int | float)
        }
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, row["iteration"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=row["iteration"])

    def plot(self) -> None:
        """Draw loss.png from metrics.jsonl."""
        plot_losses(read_metrics(self.save), self.save / PLOT)

    def close(self) -> None:
        """Flush everything; the plot is drawn a last time."""
        self._file.close()
        self.plot()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


class NoMetrics(MetricsWriter):
    """The other ranks': rank 0 alone writes."""

    def __init__(self) -> None: ...

    def write(self, kind: str, **values) -> None: ...

    def plot(self) -> None: ...

    def close(self) -> None: ...


def plot_losses(rows: list[dict], target: Path) -> None:
    """Training and held-out loss with the base's, and the indexer's KL and recall, over iterations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, index_axes = figure.subplots(2, 1, sharex=True)

    def line(axes, kind: str, name: str, **style) -> None:
        points = [(row["iteration"], row[name]) for row in rows if row["kind"] == kind and row.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), **style)

    line(loss_axes, "train", "lm_loss", label="training", color="tab:blue", alpha=0.6)
    line(loss_axes, "eval", "lm_loss", label="held out", color="tab:orange", marker="o")
    line(loss_axes, "eval", "base_lm_loss", label="held out, base", color="gray", linestyle="--")
    loss_axes.set_ylabel("LM loss (nats per token)")
    line(index_axes, "train", "indexer_kl", label="indexer KL (nats)", color="tab:green")
    line(index_axes, "train", "index_recall", label="attention mass in the selected keys", color="tab:red")
    index_axes.set_xlabel("iteration")
    for axes in (loss_axes, index_axes):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    partial = target.with_name(f".{target.stem}.partial.png")
    figure.savefig(partial, dpi=110)
    partial.replace(target)
