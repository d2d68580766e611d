"""`dsa-upcycle evaluate`: score a model beside its base and write recovery.json, recovery.md and recovery.png."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import megatron_patch
from megatron_patch.checkpoint.export import MANIFEST_FILE
from megatron_patch.errors import EXIT_OK, UserError
from megatron_patch.evaluation import commands, recovery, report
from megatron_patch.evaluation.encode import Example, encode_documents, encode_rows
from megatron_patch.evaluation.endpoint import Endpoint, find_endpoint
from megatron_patch.evaluation.lm_eval_tasks import write_lm_eval_tasks
from megatron_patch.evaluation.loading import DTYPES, ModelDirectory, inspect_directory, load_common_tokenizer
from megatron_patch.evaluation.passes import Scores, Work, score_directory, score_endpoint
from megatron_patch.evaluation.scores import require_lm_eval
from megatron_patch.evaluation.suite import read_suite
from megatron_patch.io.hashes import directory_identity
from megatron_patch.io.publish import atomic_directory, atomic_write_json, atomic_write_text, require_empty
from megatron_patch.io.strict_json import read_json

KINDS = (recovery.UPCYCLE, recovery.PRUNE)
TASKS = "lm_eval"  # in the output: the suite as lm-eval's tasks
NOT_SHOWN = ("bypassed", "scrambled_indices", "participation")  # by a server, which runs its DSA layers as they are
PROBE = 8  # tokens of the prompt that asks a server for log-probabilities


def run(
    base: str | Path,
    model: str | Path | None,
    suite: str | Path,
    output: str | Path,
    endpoint: str | None = None,
    endpoint_model: str | None = None,
    kind: str = recovery.UPCYCLE,
    limit: int | None = None,
    trust_remote_code: bool = False,
    dtype: str = "float32",
    batch_size: int = 16,
    seed: int = 0,
    device: str | None = None,
) -> int:
    """Score `base`, and `model` or what `endpoint` serves, on `suite` through lm-eval; write the report to `output`.

    Two models are never in memory together. Everything that can be checked without a model is checked before one is
    loaded.

    Args:
        base: Hugging Face directory of the base.
        model: an export (kind "upcycle"), or a pruned model ("prune": no ablations, since its base has the same DSA
            layers or none).
        suite: directory with suite.json; see `suite.py`.
        output: new or empty directory.
        endpoint: instead of `model`, URL of an OpenAI-compatible completions server; see `endpoint.py`.
        endpoint_model: the name under which it serves; None: the only one.
        limit: score only the first so many rows of each task and held-out documents.
        trust_remote_code: run code of the model's directory where it is not this package's.
        dtype: "float32" or "bfloat16"; of the weights and the computation.
        batch_size: rows per forward pass, or prompts per request.
        seed: of the scrambled selections.
        device: "cpu" or "cuda"; None: CUDA where there is one.

    Returns:
        0: the report is written, whatever its verdict.

    Raises:
        UserError: the input breaks a rule.
    """
    started = time.monotonic()
    output, place = require_empty(output), _check_settings(kind, dtype, batch_size, device)
    _check_model(model, endpoint, endpoint_model)
    versions = _versions()
    scored = read_suite(suite, limit)
    base_dir = inspect_directory(base, trust_remote_code=trust_remote_code)
    model_dir = None if model is None else inspect_directory(model, trust_remote_code=trust_remote_code)
    _check_kind(kind, base_dir, model_dir)
    tokenizer = load_common_tokenizer(base, base if model is None else model, trust_remote_code=trust_remote_code)
    tasks = [encode_rows(tokenizer, task.rows) for task in scored.tasks]
    documents = encode_documents(tokenizer, scored.held_out)
    for directory in filter(None, (base_dir, model_dir)):
        _check_fits([*tasks, documents], directory)
    server = None if endpoint is None else find_endpoint(endpoint, endpoint_model, documents[0].ids[:PROBE])

    with atomic_directory(output) as directory:
        (directory / TASKS).mkdir()
        files = write_lm_eval_tasks(directory / TASKS, scored, tasks, documents, tokenizer.eos_token)
        work = Work(scored, tasks, documents, files, tokenizer, batch_size, seed, DTYPES[dtype], place)
        identities = [directory_identity(path, progress=True) for path in (base, model) if path is not None]
        of_base = score_directory(base_dir, work, "base")
        if model_dir is not None:
            ablated = model_dir.dsa_layers if kind == recovery.UPCYCLE else ()
            of_model = score_directory(model_dir, work, "model", ablated)
        else:
            of_model = score_endpoint(server, work, trust_remote_code=trust_remote_code)
        content = _assemble(kind, work, (base_dir, model_dir or server), identities, of_base, of_model)
        content["warnings"] = _warnings(content, model_dir, identities[0], of_base, of_model, work.dtype, limit)
        content["lm_eval"] = {
            "version": versions["lm_eval"],
            "commands": commands.commands(work, output / TASKS, (base_dir, model_dir or server)),
        }
        content["settings"] = {
            "limit": limit,
            "dtype": dtype,
            "device": str(place),
            "batch_size": batch_size,
            "seed": seed,
            "seconds": round(time.monotonic() - started, 1),
            "versions": versions,
        }
        _write(directory, content)
    report.print_console(content)
    print(f"written: {output / 'recovery.json'}, recovery.md, recovery.png, {TASKS}/")
    return EXIT_OK


def _write(directory: Path, content: dict[str, Any]) -> None:
    shutil.rmtree(directory / TASKS / "__pycache__", ignore_errors=True)  # lm-eval imported from there
    atomic_write_json(directory / "recovery.json", content)
    atomic_write_text(directory / "recovery.md", report.markdown(content))
    report.write_figure(content, directory / "recovery.png")


def _check_model(model: str | Path | None, endpoint: str | None, endpoint_model: str | None) -> None:
    if (model is None) == (endpoint is None):
        given = "neither" if model is None else "both"
        raise UserError(
            f"evaluate needs exactly one of --model and --endpoint: {given} given; --model DIR for an export, --endpoint "
            "URL for a served model"
        )
    if endpoint is None and endpoint_model is not None:
        raise UserError(
            f"--endpoint-model names what an --endpoint serves: {endpoint_model!r} without one; leave it out"
        )


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


def _check_kind(kind: str, base: ModelDirectory, model: ModelDirectory | None) -> None:
    if kind == recovery.PRUNE:
        if model is not None and base.dsa_layers != model.dsa_layers:
            raise UserError(
                f"a pruned model has the DSA layers of its base: {base.path} has {list(base.dsa_layers)}, {model.path} has "
                f"{list(model.dsa_layers)}; give the model that was pruned as --base, or use --kind upcycle"
            )
        return
    if base.dsa_layers:
        raise UserError(
            f"--base must be a base without DSA layers: {base.path} has some; give the model it was made from"
        )
    if model is None:  # served: nothing tells what it is made of
        return
    if not model.dsa_layers:
        raise UserError(
            f"--kind upcycle needs a --model with DSA layers: {model.path} has none; give what `dsa-upcycle export` "
            "wrote, or --kind prune"
        )


def _check_fits(examples: list[list[Example]], directory: ModelDirectory) -> None:
    every = [example.ids for part in examples for example in part]
    largest, longest = max(map(max, every)), max(map(len, every))
    if largest >= directory.arch.vocab_size:
        raise UserError(
            f"token ids must be below vocab_size: the suite has id {largest}, {directory.path} has "
            f"{directory.arch.vocab_size} rows; the tokenizer is not this model's, copy the right one"
        )
    if longest > directory.arch.max_positions:
        raise UserError(
            f"rows must fit into max_position_embeddings, where lm-eval would cut them: the longest has {longest} tokens, "
            f"{directory.path} takes {directory.arch.max_positions}; give shorter rows, or a smaller max_length"
        )


def _assemble(
    kind: str,
    work: Work,
    models: tuple[ModelDirectory, ModelDirectory | Endpoint],
    identities: list[str],
    base: Scores,
    model: Scores,
) -> dict[str, Any]:
    served = isinstance(models[1], Endpoint)
    topk = None if served else models[1].index_topk
    layers = () if served or kind == recovery.PRUNE else models[1].dsa_layers

    def beyond(examples: list[Example]) -> float | None:
        return None if topk is None else recovery.fraction_longer([len(example.ids) for example in examples], topk)

    tasks = [
        recovery.task_entry(recovery.TaskScores(task, of_base["model"], of_model, beyond(examples)))
        for task, examples, of_base, of_model in zip(work.suite.tasks, work.tasks, base.tasks, model.tasks, strict=True)
    ]
    participation = None
    if layers:
        participation = recovery.participation_entry(model.documents, layers, beyond(work.documents))
    not_measured = NOT_SHOWN if served and kind == recovery.UPCYCLE else ()
    if served:
        described = {"path": models[1].url, "sha256": None, "served_name": models[1].model}
    else:
        described = {"path": str(models[1].path), "sha256": identities[1]}
    return {
        "schema": recovery.SCHEMA,
        "kind": kind,
        "base": {"path": str(models[0].path), "sha256": identities[0]},
        "model": described,
        "tasks": tasks,
        "perplexity": recovery.perplexity_entry(base.documents, model.documents),
        "participation": participation,
        "summary": recovery.summary_entry(tasks, participation, not_measured),
        "suite": {"name": work.suite.name, "rows": sum(map(len, work.tasks)), "index_topk": topk},
    }


def _warnings(
    content: Mapping[str, Any],
    directory: ModelDirectory | None,
    base_identity: str,
    base: Scores,
    model: Scores,
    dtype: torch.dtype,
    limit: int | None,
) -> list[str]:
    """What makes the figures mean less than they seem to."""
    found = []
    if limit is not None:
        found.append(f"only the first {limit} rows of each task and held-out documents were scored (--limit).")
    if model.documents is None:
        found.append(
            "the endpoint gives no log-probabilities of a prompt (echo with logprobs): perplexity is not measured."
        )
    if directory is None or content["kind"] == recovery.PRUNE:
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
        return str(read_json(file)["base"]["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{MANIFEST_FILE} must name the base: {file}: {error!r}; export it again") from None


def _versions() -> dict[str, str]:
    lm_eval = require_lm_eval()
    import transformers

    return {
        "megatron_patch": megatron_patch.__version__,
        "lm_eval": lm_eval,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
