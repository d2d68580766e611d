"""`dsa-upcycle evaluate`: score a model beside its base and write recovery.json, recovery.md and recovery.png."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import megatron_patch
from megatron_patch.checkpoint.export import MANIFEST_FILE
from megatron_patch.devices.device import inference_device
from megatron_patch.errors import EXIT_OK, UserError
from megatron_patch.evaluation import commands, recovery, report
from megatron_patch.evaluation.encode import Example, encode_documents, encode_rows
from megatron_patch.evaluation.endpoint import Endpoint, find_endpoint
from megatron_patch.evaluation.lm_eval_tasks import write_lm_eval_tasks
from megatron_patch.evaluation.loading import DTYPES, ModelDirectory, load_common_tokenizer
from megatron_patch.evaluation.passes import Scores, Work, score
from megatron_patch.evaluation.scores import require_lm_eval
from megatron_patch.evaluation.sides import Given, Planned, Side, check_fits, describe, open_directories
from megatron_patch.evaluation.suite import read_suite
from megatron_patch.io.publish import atomic_directory, atomic_write_json, atomic_write_text, require_empty
from megatron_patch.io.strict_json import read_json

Sides = tuple[Side, Side]  # base and model
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
    plan: str | Path | None = None,
    base_endpoint: str | None = None,
    base_endpoint_model: str | None = None,
    kind: str = recovery.UPCYCLE,
    limit: int | None = None,
    trust_remote_code: bool = False,
    dtype: str = "float32",
    batch_size: int = 16,
    seed: int = 0,
    device: str | None = None,
) -> int:
    """Score a base and a model on `suite` through lm-eval, and write the report to `output`.

    Two models are never in memory together. Everything that can be checked without a model is checked before one is
    loaded.

    Args:
        base: Hugging Face directory of the base; with `base_endpoint` its config and tokenizer are enough.
        model: an export (kind "upcycle"), or a pruned model ("prune": no ablations, since its base has the same DSA
            layers or none).
        suite: directory with suite.json; see `suite.py`.
        output: new or empty directory.
        endpoint: instead of `model`, URL of an OpenAI-compatible completions server; see `endpoint.py`.
        endpoint_model: the name under which it serves; None: the only one.
        plan: instead of `model`, a plan.json of `prune plan` for `base`, which is masked as it says (kind "prune").
        base_endpoint, base_endpoint_model: the same for a base that is served (kind "prune").
        limit: score only the first so many rows of each task and held-out documents.
        trust_remote_code: run code of the model's directory where it is not this package's.
        dtype: "float32" or "bfloat16"; of the weights and the computation.
        batch_size: rows per forward pass, or prompts per request.
        seed: of the scrambled selections.
        device: "cpu", "cuda" or "npu"; None: what is there.

    Returns:
        0: the report is written, whatever its verdict.

    Raises:
        UserError: the input breaks a rule.
    """
    started = time.monotonic()
    given = Given(kind, base, model, endpoint, endpoint_model, plan, base_endpoint, base_endpoint_model)
    output, place = require_empty(output), _check_settings(dtype, batch_size, device)
    versions = _versions()
    scored = read_suite(suite, limit)
    base_dir, opened = open_directories(given, trust_remote_code=trust_remote_code)
    tokenizer = load_common_tokenizer(base, model or base, trust_remote_code=trust_remote_code)
    tasks = [encode_rows(tokenizer, task.rows) for task in scored.tasks]
    documents = encode_documents(tokenizer, scored.held_out)
    for directory in (base_dir, opened):
        if isinstance(directory, ModelDirectory):
            check_fits([*tasks, documents], directory)
    sides = _connect(given, base_dir, opened, documents[0].ids[:PROBE])

    with atomic_directory(output) as directory:
        (directory / TASKS).mkdir()
        files = write_lm_eval_tasks(directory / TASKS, scored, tasks, documents, tokenizer.eos_token)
        work = Work(scored, tasks, documents, files, tokenizer, batch_size, seed, DTYPES[dtype], place)
        content = _score(given, work, sides, trust_remote_code=trust_remote_code)
        if limit is not None:
            text = f"only the first {limit} rows of each task and held-out documents were scored (--limit)."
            content["warnings"].insert(0, text)
        content["lm_eval"] = {
            "version": versions["lm_eval"],
            "commands": commands.commands(work, output / TASKS, base_dir.path, sides),
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


def _connect(given: Given, base: ModelDirectory, model: ModelDirectory | Planned | None, probe: list[int]) -> Sides:
    """Base and model, servers asked whether they answer `probe`, the first tokens of a document."""
    if given.base_endpoint is not None:
        base = find_endpoint(given.base_endpoint, given.base_endpoint_model, probe)
    return base, model or find_endpoint(given.endpoint, given.endpoint_model, probe)


def _score(given: Given, work: Work, sides: Sides, *, trust_remote_code: bool) -> dict[str, Any]:
    """recovery.json, but for how it was run."""
    described = tuple(map(describe, sides))
    if isinstance(sides[0], Endpoint):
        described[0]["directory"] = str(given.base)  # of the tokenizer
    upcycled = given.kind == recovery.UPCYCLE and isinstance(sides[1], ModelDirectory)
    ablated = sides[1].dsa_layers if upcycled else ()
    of_base = score(sides[0], work, "base", trust_remote_code=trust_remote_code)
    of_model = score(sides[1], work, "model", ablated, trust_remote_code=trust_remote_code)
    content = _assemble(given.kind, work, sides, described, of_base, of_model)
    content["warnings"] = [
        f"the endpoint of the {name} gives no log-probabilities of a prompt (echo with logprobs): its perplexity is not measured."
        for name, scores in (("base", of_base), ("model", of_model))
        if scores.documents is None
    ]
    if upcycled:
        content["warnings"] += _warnings(content, sides[1], described[0]["sha256"], of_base, of_model, work.dtype)
    return content


def _write(directory: Path, content: dict[str, Any]) -> None:
    shutil.rmtree(directory / TASKS / "__pycache__", ignore_errors=True)  # lm-eval imported from there
    atomic_write_json(directory / "recovery.json", content)
    atomic_write_text(directory / "recovery.md", report.markdown(content))
    report.write_figure(content, directory / "recovery.png")


def _check_settings(dtype: str, batch_size: int, device: str | None) -> torch.device:
    if dtype not in DTYPES:
        raise UserError(f"--dtype must be {' or '.join(DTYPES)}: {dtype!r}; choose one")
    if batch_size < 1:
        raise UserError(f"--batch-size must be 1 or more: {batch_size}; the default is 16")
    return inference_device(device)


def _assemble(
    kind: str, work: Work, sides: Sides, described: tuple[dict[str, Any], ...], base: Scores, model: Scores
) -> dict[str, Any]:
    served = isinstance(sides[1], Endpoint)
    directory = sides[1].directory if isinstance(sides[1], Planned) else sides[1]
    topk = None if served else directory.index_topk
    layers = () if served or kind == recovery.PRUNE else directory.dsa_layers

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
    return {
        "schema": recovery.SCHEMA,
        "kind": kind,
        "base": described[0],
        "model": described[1],
        "tasks": tasks,
        "perplexity": recovery.perplexity_entry(base.documents, model.documents, work.document_tokens),
        "participation": participation,
        "summary": recovery.summary_entry(tasks, participation, not_measured),
        "suite": {"name": work.suite.name, "rows": sum(map(len, work.tasks)), "index_topk": topk},
    }


def _warnings(
    content: Mapping[str, Any], directory: ModelDirectory, base_identity: str, base: Scores, model: Scores, dtype: torch.dtype
) -> list[str]:
    """What makes the figures of an upcycled model mean less than they seem to."""
    found = []
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
