"""`dsa-upcycle prune observe`: run a model over data and count, per MoE layer and expert, who is chosen and what it adds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from megatron_patch.errors import EXIT_OK, UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.pruning.hooks import ExpertObserver
from megatron_patch.pruning.load import DTYPES, check_device, load_model, load_tokenizer
from megatron_patch.pruning.moe_layers import MoeLayers, read_moe_layers
from megatron_patch.pruning.prompts import TEXT_KEY, Encoded, check_vocabulary, encode_file
from megatron_patch.pruning.statistics import (
    SourceStatistics,
    Statistics,
    check_source_name,
    load_progress,
    model_sha256,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAD = 0  # any id: padding stands on the right, where no token sees it


@dataclass(frozen=True)
class Settings:
    """What is observed, and how.

    Attributes:
        model: Hugging Face directory.
        data: source -> file of JSON lines.
        text_key, chat, max_length, shard: as in `prompts.encode_file`.
        batch_size: rows of a forward pass.
        generate: most tokens to generate after each row; 0: the rows alone.
        dtype: "float32", "bfloat16", or "auto", the checkpoint's.
        device: of `load.check_device`.
        save_interval: batches between two writes of the unfinished statistics.
    """

    model: Path
    data: dict[str, Path]
    text_key: str = TEXT_KEY
    chat: bool = False
    max_length: int = 2048
    shard: tuple[int, int] = (0, 1)
    batch_size: int = 8
    generate: int = 0
    dtype: str = "auto"
    device: str | None = None
    save_interval: int = 50

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("max-length", self.max_length, 1),
            ("batch-size", self.batch_size, 1),
            ("generate", self.generate, 0),
            ("save-interval", self.save_interval, 1),
        ):
            if value < least:
                raise UserError(f"--{flag} must be {least} or more: {value}; see dsa-upcycle prune observe --help")
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype must be one of {', '.join(DTYPES)}: {self.dtype!r}; choose one")
        if not self.data:
            raise UserError("there must be something to observe: no --data was given; give a file of JSON lines")
        if not 0 <= self.shard[0] < self.shard[1]:
            raise UserError(f"--shard must be I/N with 0 <= I < N: {self.shard[0]}/{self.shard[1]}; e.g. 0/4 to 3/4")

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one before."""
        shared = ("text_key", "chat", "max_length", "batch_size", "generate", "dtype")
        return {
            **{key: getattr(self, key) for key in shared},
            "shard": list(self.shard),
            "data": {source: file_sha256(path) for source, path in self.data.items()},
        }


def sources_of(data: Sequence[Path], names: Sequence[str]) -> dict[str, Path]:
    """Source -> file: the names given, or the files' own without ending.

    Raises:
        UserError: a missing file, another number of names than of files, a bad name, or one name for two files.
    """
    for path in data:
        if not path.is_file():
            raise UserError(f"--data must be files of JSON lines: {path} is none; check the path")
    if names and len(names) != len(data):
        raise UserError(f"--source names each --data file: {len(names)} names for {len(data)} files; give as many")
    names = [check_source_name(name) for name in (names or [path.stem for path in data])]
    if len(set(names)) != len(names):
        raise UserError(f"sources must differ: {', '.join(names)}; give names with --source")
    return dict(zip(names, data, strict=True))


def parse_shard(text: str) -> tuple[int, int]:
    """`I/N` -> (I, N)."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise UserError(f"--shard must be I/N with 0 <= I < N: {text!r}; e.g. 0/4 to 3/4")
    return int(parts[0]), int(parts[1])


def check_output(output: Path, resume: bool = False) -> Path:
    """Where the unfinished statistics stand.

    Raises:
        UserError: `output` exists, or an unfinished run's file does and `resume` is off.
    """
    if output.exists():
        raise UserError(f"--output must be a new file: {output} exists; give another path or remove it")
    partial = output.with_name(output.name + ".partial")
    if partial.exists() and not resume:
        raise UserError(f"a run for {output} did not finish: {partial} is there; go on with --resume, or remove it")
    return partial


def run(settings: Settings, output: str | Path, *, resume: bool = False) -> int:
    """Observe and write `output`. Everything that can be checked without the model is checked before it is loaded.

    A run that is killed leaves `<output>.partial`, at most `save_interval` batches old.

    Returns:
        0.

    Raises:
        UserError: the input breaks a rule.
    """
    output, device = Path(output), check_device(settings.device)
    partial = check_output(output, resume)
    layers = read_moe_layers(settings.model)
    tokenizer = load_tokenizer(settings.model)
    statistics, progress = _start(settings, layers, partial)
    encoded = {source: _encode(tokenizer, path, settings) for source, path in settings.data.items()}
    check_vocabulary(encoded.values(), settings.model)

    model = load_model(settings.model, dtype=settings.dtype, device=device)
    statistics = _observe(model, layers, tokenizer, encoded, settings, statistics, progress, partial)
    statistics.save(output)
    partial.unlink(missing_ok=True)
    print_summary(statistics)
    print(f"written: {output}")
    return EXIT_OK


def _start(settings: Settings, layers: MoeLayers, partial: Path) -> tuple[Statistics, dict[str, Any]]:
    """Statistics and progress to go on from; empty ones where there are none."""
    empty = Statistics(
        layers.model_type, model_sha256(settings.model), layers.layers, layers.num_experts, layers.top_k, sources={}
    )
    mine = settings.fingerprint()
    if not partial.exists():
        return empty, {"settings": mine, "batches": dict.fromkeys(settings.data, 0)}
    statistics, progress = load_progress(partial)
    empty.merge(statistics)  # refuses those of another model
    theirs = (progress or {}).get("settings", {})
    for key, value in mine.items():
        if theirs.get(key) != value:
            raise UserError(
                f"a resumed run has the settings of the one before: {key} was {theirs.get(key)!r} and is {value!r}; run it "
                f"as before, or remove {partial}"
            )
    return statistics, progress


def _encode(tokenizer: "PreTrainedTokenizerBase", path: Path, settings: Settings) -> Encoded:
    encoded = encode_file(
        tokenizer,
        path,
        text_key=settings.text_key,
        chat=settings.chat,
        max_length=settings.max_length,
        for_reply=settings.generate > 0,
        shard=settings.shard,
    )
    # The longest first: a lack of memory shows at once. Stable, so that a resumed run makes the same batches.
    encoded.rows.sort(key=len, reverse=True)
    if encoded.cut or encoded.left_out:
        print(
            f"{path.name}: of {len(encoded.rows) + encoded.left_out} rows {encoded.cut} were cut and {encoded.left_out} left "
            f"out at --max-length {settings.max_length}"
        )
    return encoded


def _observe(
    model: "PreTrainedModel",
    layers: MoeLayers,
    tokenizer: "PreTrainedTokenizerBase",
    encoded: dict[str, Encoded],
    settings: Settings,
    statistics: Statistics,
    progress: dict[str, Any],
    partial: Path,
) -> Statistics:
    total = sum(len(row) for part in encoded.values() for row in part.rows)
    with tqdm(total=total, unit="tok", unit_scale=True, desc="observe") as bar:
        for source, part in encoded.items():
            bar.set_postfix_str(source)
            observer = ExpertObserver(model, layers)
            if source in statistics.sources:
                observer.statistics = statistics.sources[source]
            done = progress["batches"].get(source, 0)
            for number, rows in enumerate(_batches(part.rows, settings.batch_size)):
                if number >= done:
                    observe_batch(model, observer, _continued(model, tokenizer, rows, settings.generate))
                    progress["batches"][source] = number + 1
                    statistics.sources[source] = observer.statistics
                    if (number + 1) % settings.save_interval == 0:
                        statistics.save(partial, progress)
                bar.update(sum(map(len, rows)))
            _require_finite(observer.statistics, settings.model)
            statistics.save(partial, progress)
    return statistics


def _batches(rows: Sequence[Sequence[int]], size: int) -> Iterator[Sequence[Sequence[int]]]:
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]


@torch.inference_mode()
def observe_batch(model: "PreTrainedModel", observer: ExpertObserver, rows: Sequence[Sequence[int]]) -> None:
    """One forward pass over rows of token ids; adds to the observer's statistics."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    observer.real = mask.flatten().bool()
    with observer:  # the trunk alone: logits of a long batch would be gigabytes
        model.base_model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), use_cache=False)
    observer.count_tokens(int(mask.sum()))


@torch.inference_mode()
def _continued(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", rows: Sequence[Sequence[int]], tokens: int
) -> list[list[int]]:
    """The rows with what the model says next (greedy), the end token included.

    Generation itself is not observed: the whole rows are, in one pass afterwards. So a token counts once, the last one
    too, which generation never feeds, and a finished row's filler does not.
    """
    if not tokens:
        return [list(row) for row in rows]
    eos = tokenizer.eos_token_id
    pad = PAD if eos is None else eos
    longest = max(map(len, rows))
    ids = torch.tensor([[*[pad] * (longest - len(row)), *row] for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    made = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=pad, eos_token_id=eos
    )
    return [[*row, *_until(reply, eos)] for row, reply in zip(rows, made[:, longest:].tolist(), strict=True)]


def _until(ids: list[int], end: int | None) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


def _require_finite(source: SourceStatistics, model: Path) -> None:
    if not bool(source.gate_norm_square.isfinite().all()):
        raise UserError(
            f"routing weights and expert outputs must be finite: {model} gives NaN or infinity; try --dtype float32"
        )


def run_merge(files: Sequence[Path], output: str | Path) -> int:
    """Add statistics of several runs; errors as in `Statistics.load` and `merge`, or a file given twice."""
    output = Path(output)
    check_output(output)
    hashes: dict[str, Path] = {}
    parts = [Statistics.load(path) for path in files]
    for path in files:
        digest = file_sha256(path)
        if digest in hashes:
            raise UserError(f"a part must be added once: {path} and {hashes[digest]} are the same; name each file once")
        hashes[digest] = path
    merged = parts[0].merge(*parts[1:])
    merged.save(output)
    print_summary(merged)
    print(f"written: {output}")
    return EXIT_OK


def print_summary(statistics: Statistics) -> None:
    """A line per source: tokens, and experts that were never chosen."""
    for name, source in statistics.sources.items():
        never = int((source.count == 0).sum())
        print(
            f"{name}: {source.tokens:,} tokens, {len(statistics.layers)} MoE layers; {never} of {source.count.numel()} "
            f"experts never chosen{'' if source.has_gates else '; expert ids only, no routing weights'}"
        )
