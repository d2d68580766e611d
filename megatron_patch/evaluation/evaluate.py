"""`dsa-upcycle evaluate`: score a model beside its base and write recovery.json, recovery.md and recovery.png."""

import gc
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

import megatron_patch
from megatron_patch.checkpoint.export import MANIFEST_FILE
from megatron_patch.errors import EXIT_OK, UserError
from megatron_patch.evaluation import recovery, report
from megatron_patch.evaluation.ablations import BYPASSED, SCRAMBLED, Ablation, bypassed, layer_name, scrambled
from megatron_patch.evaluation.encode import Example, encode_documents, encode_rows
from megatron_patch.evaluation.loading import (
    DTYPES,
    ModelDirectory,
    inspect_directory,
    load_common_tokenizer,
    load_model,
)
from megatron_patch.evaluation.scores import DocumentScores, document_scores, exact_matches
from megatron_patch.evaluation.suite import Suite, read_suite
from megatron_patch.io.hashes import directory_identity
from megatron_patch.io.publish import atomic_directory, atomic_write_json, atomic_write_text, require_empty

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

KINDS = (recovery.UPCYCLE, recovery.PRUNE)


@dataclass(frozen=True)
class _Work:
    """What both models are scored on, as tokens, and how."""

    suite: Suite
    tasks: list[list[Example]]
    documents: list[Example]
    batch_size: int
    seed: int
    dtype: torch.dtype
    device: torch.device

    @property
    def tokens(self) -> int:
        return sum(len(example.ids) for examples in (*self.tasks, self.documents) for example in examples)


@dataclass(frozen=True)
class _Scores:
    """Of one model: each task's scores by name of ablation, and the documents'."""

    tasks: list[dict[str, Tensor]]
    documents: DocumentScores


def run(
    base: str | Path,
    model: str | Path,
    suite: str | Path,
    output: str | Path,
    kind: str = recovery.UPCYCLE,
    limit: int | None = None,
    trust_remote_code: bool = False,
    dtype: str = "float32",
    batch_size: int = 16,
    seed: int = 0,
    device: str | None = None,
) -> int:
    """Score `model` and `base` on `suite`; write the report to `output`.

    The two are never in memory together. Everything that can be checked without a model is checked before one is loaded.

    Args:
        base: Hugging Face directory of the base.
        model: an export (kind "upcycle"), or a pruned model ("prune": no ablations, since its base has the same DSA
            layers or none).
        suite: directory with suite.json; see `suite.py`.
        output: new or empty directory.
        limit: score only the first so many rows of each task and held-out documents.
        trust_remote_code: run code of the model's directory where it is not this package's.
        dtype: "float32" or "bfloat16"; of the weights and the computation.
        batch_size: rows per forward pass.
        seed: of the scrambled selections.
        device: "cpu" or "cuda"; None: CUDA where there is one.

    Returns:
        0: the report is written, whatever its verdict.

    Raises:
        UserError: the input breaks a rule.
    """
    started = time.monotonic()
    output, place = require_empty(output), _check_settings(kind, dtype, batch_size, device)
    scored = read_suite(suite, limit)
    base_dir = inspect_directory(base, trust_remote_code=trust_remote_code)
    model_dir = inspect_directory(model, trust_remote_code=trust_remote_code)
    _check_kind(kind, base_dir, model_dir)
    tokenizer = load_common_tokenizer(base, model, trust_remote_code=trust_remote_code)
    work = _encode(tokenizer, scored, batch_size, seed, DTYPES[dtype], place)
    _check_vocabulary(work, base_dir, model_dir)
    identities = [directory_identity(path, progress=True) for path in (base, model)]

    ablated = model_dir.dsa_layers if kind == recovery.UPCYCLE else ()
    of_base, of_model = _score(base_dir, work, "base", ()), _score(model_dir, work, "model", ablated)
    content = _assemble(kind, (base_dir, model_dir), identities, work, of_base, of_model)
    content["warnings"] = _warnings(content, model_dir, identities[0], of_base, of_model, work.dtype, limit)
    content["settings"] = {
        "limit": limit,
        "dtype": dtype,
        "device": str(place),
        "batch_size": batch_size,
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "versions": _versions(),
    }
    with atomic_directory(output) as directory:
        atomic_write_json(directory / "recovery.json", content)
        atomic_write_text(directory / "recovery.md", report.markdown(content))
        report.write_figure(content, directory / "recovery.png")
    report.print_console(content)
    print(f"written: {output / 'recovery.json'}, recovery.md, recovery.png")
    return EXIT_OK


def _check_settings(kind: str, dtype: str, batch_size: int, device: str | None) -> torch.device:
    for flag, value, allowed in (("kind", kind, KINDS), ("dtype", dtype, tuple(DTYPES))):
        if value not in allowed:
            raise UserError(f"--{flag} must be {' or '.join(allowed)}: {value!r}; choose one")
    if batch_size < 1:
        raise UserError(f"--batch-size must be 1 or more: {batch_size}; the default is 16")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device must be cpu or cuda: {device!r}; choose one")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda needs a GPU that torch can use: there is none; use --device cpu")
    return torch.device(device)


def _check_kind(kind: str, base: ModelDirectory, model: ModelDirectory) -> None:
    if kind == recovery.PRUNE:
        if base.dsa_layers != model.dsa_layers:
            raise UserError(
                f"a pruned model has the DSA layers of its base: {base.path} has {list(base.dsa_layers)}, {model.path} has "
                f"{list(model.dsa_layers)}; give the model that was pruned as --base, or use --kind upcycle"
            )
        return
    if base.dsa_layers:
        raise UserError(
            f"--base must be a base without DSA layers: {base.path} has some; give the model it was made from"
        )
    if not model.dsa_layers:
        raise UserError(
            f"--kind upcycle needs a --model with DSA layers: {model.path} has none; give what `dsa-upcycle export` "
            "wrote, or --kind prune"
        )


def _encode(
    tokenizer: "PreTrainedTokenizerBase",
    suite: Suite,
    batch_size: int,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> _Work:
    tasks = [encode_rows(tokenizer, task.rows) for task in suite.tasks]
    documents = encode_documents(tokenizer, suite.held_out)
    return _Work(suite, tasks, documents, batch_size, seed, dtype, device)


def _check_vocabulary(work: _Work, *directories: ModelDirectory) -> None:
    largest = max(max(example.ids) for examples in (*work.tasks, work.documents) for example in examples)
    for directory in directories:
        if largest >= directory.arch.vocab_size:
            raise UserError(
                f"token ids must be below vocab_size: the suite has id {largest}, {directory.path} has "
                f"{directory.arch.vocab_size} rows; the tokenizer is not this model's, copy the right one"
            )


def _score(directory: ModelDirectory, work: _Work, label: str, ablated: tuple[int, ...]) -> _Scores:
    """Load, score also with each ablation of the DSA layers `ablated`, and forget the model."""
    model = load_model(directory, dtype=work.dtype, device=work.device)
    with tqdm(total=work.tokens, unit="tok", unit_scale=True, desc=f"score {label}") as bar:
        options: dict[str, Any] = {"batch_size": work.batch_size, "progress": bar.update}
        tasks = []
        for task, examples in zip(work.suite.tasks, work.tasks, strict=True):
            bar.set_postfix_str(task.name)
            tasks.append(exact_matches(model, examples, _ablations(model, ablated, work.seed), **options))
        bar.set_postfix_str("held-out text")
        alone = {layer_name(i): partial(bypassed, model, [i]) for i in ablated}
        documents = document_scores(model, work.documents, _ablations(model, ablated, work.seed) | alone, **options)
    del model
    gc.collect()
    return _Scores(tasks, documents)


def _ablations(model: "PreTrainedModel", ablated: tuple[int, ...], seed: int) -> dict[str, Ablation]:
    """Fresh ones for each task, so that its scrambled score does not depend on which tasks came before."""
    if not ablated:
        return {}
    generator = torch.Generator().manual_seed(seed)
    return {BYPASSED: partial(bypassed, model), SCRAMBLED: partial(scrambled, model, generator)}


def _assemble(
    kind: str,
    directories: tuple[ModelDirectory, ModelDirectory],
    identities: list[str],
    work: _Work,
    base: _Scores,
    model: _Scores,
) -> dict[str, Any]:
    topk, layers = directories[1].index_topk, directories[1].dsa_layers if kind == recovery.UPCYCLE else ()

    def beyond(examples: list[Example]) -> float | None:
        return None if topk is None else recovery.fraction_longer([len(example.ids) for example in examples], topk)

    tasks = [
        recovery.task_entry(recovery.TaskScores(task, of_base["model"], of_model, beyond(examples)))
        for task, examples, of_base, of_model in zip(work.suite.tasks, work.tasks, base.tasks, model.tasks, strict=True)
    ]
    participation = None
    if layers:
        participation = recovery.participation_entry(model.documents, layers, beyond(work.documents))
    return {
        "schema": recovery.SCHEMA,
        "kind": kind,
        "base": {"path": str(directories[0].path), "sha256": identities[0]},
        "model": {"path": str(directories[1].path), "sha256": identities[1]},
        "tasks": tasks,
        "perplexity": recovery.perplexity_entry(base.documents, model.documents),
        "participation": participation,
        "summary": recovery.summary_entry(tasks, participation),
        "suite": {"name": work.suite.name, "rows": sum(map(len, work.tasks)), "index_topk": topk},
    }


def _warnings(
    content: Mapping[str, Any],
    directory: ModelDirectory,
    base_identity: str,
    base: _Scores,
    model: _Scores,
    dtype: torch.dtype,
    limit: int | None,
) -> list[str]:
    """What makes the figures mean less than they seem to."""
    found = []
    if limit is not None:
        found.append(f"only the first {limit} rows of each task and held-out documents were scored (--limit).")
    if content["kind"] == recovery.PRUNE:
        return found
    named = _base_in_manifest(directory.path)
    if named not in (None, base_identity):
        found.append(f"{MANIFEST_FILE} of the model names another base (sha256 {named[:16]}) than --base.")
    apart = recovery.bypassed_is_base(base.documents, model.documents)
    tolerance = recovery.BASE_TOLERANCE[dtype]
    if apart > tolerance:
        found.append(
            f"with its DSA layers bypassed the model should be its base, but a document's loss differs by {apart:.2g} "
            f"nats per token (more than {tolerance}): its base part is another."
        )
    if not any(task["rows_beyond_topk"] for task in content["tasks"]):
        found.append(
            f"no row of any task is longer than top-k ({directory.index_topk}), so the indexer chooses nothing and "
            "scrambling changes nothing."
        )
    return found


def _base_in_manifest(export: Path) -> str | None:
    """The base's hash that an export's manifest names; None without a manifest."""
    file = export / MANIFEST_FILE
    if not file.is_file():
        return None
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["base"]["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{MANIFEST_FILE} must name the base: {file}: {error!r}; export it again") from None


def _versions() -> dict[str, str]:
    import transformers

    return {
        "megatron_patch": megatron_patch.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
