"""Make plan.json: check that the number of experts is feasible, score, choose, and say what it costs and saves."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_patch.errors import EXIT_OK, UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.publish import atomic_write_json
from megatron_patch.pruning import criteria, dry_run, tid2eid
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.config_json import MTP_COUNT
from megatron_patch.pruning.plan_file import ABSENT, DRY_RUN_KEY, SCHEMA, plan_of
from megatron_patch.pruning.plan_report import print_plan
from megatron_patch.pruning.plan_warnings import warnings_of
from megatron_patch.pruning.shards import pruned_nbytes
from megatron_patch.pruning.statistics import SourceStatistics, Statistics
from megatron_patch.pruning.wish import Wish, check, parse_protected, parse_weights


def run(
    model: str | Path,
    wish: Wish,
    *,
    stats: str | Path | None = None,
    output: str | Path | None = None,
    device_memory_gb: float | None = None,
    dry: dry_run.DryRun | None = None,
) -> int:
    """`dsa-upcycle prune plan`: check, write the plan and print what it means.

    Args:
        model: the model's directory.
        wish: what is asked for.
        stats: file of `prune observe`; not needed where all experts are kept.
        output: plan.json to write.
        device_memory_gb: also say how many devices of so many 1e9 bytes the weights need.
        dry: also load the model, and compare it with itself masked as planned, over this text.

    Returns:
        the exit code.

    Raises:
        UserError: an argument is wrong, the number is infeasible, the checkpoint is damaged, the statistics are another model's.
    """
    check(model, wish)
    if output is None:
        raise UserError(
            "--output must name the plan to write: it is missing; give e.g. --output plan.json, or --check-only"
        )
    if device_memory_gb is not None and device_memory_gb <= 0:
        raise UserError(f"--device-memory-gb must be above 0: {device_memory_gb}; give e.g. 64")
    rows = None if dry is None else dry_run.encode(dry, model)
    content = make_plan(model, wish, stats)
    if dry is not None:
        content[DRY_RUN_KEY] = dry_run.run(MoeCheckpoint(model), plan_of(content), dry, rows)
    atomic_write_json(output, content)
    print_plan(content, Path(output), device_memory_gb)
    return EXIT_OK


def make_plan(model: str | Path, wish: Wish, stats: str | Path | None = None) -> dict:
    """The content of plan.json.

    Raises:
        UserError: see `run`.
    """
    check(model, wish)
    checkpoint = MoeCheckpoint(model)
    drop_mtp = wish.mtp == "drop"
    if wish.mtp == "scores" and not checkpoint.mtp_layers:
        raise UserError(f"--mtp scores needs MTP layers: {checkpoint.path} has none; use --mtp drop")
    layers = [number for number, layer in checkpoint.layers.items() if not (layer.mtp and drop_mtp)]
    everything = wish.keep == checkpoint.routing.experts
    if stats is None and not everything:
        raise UserError(
            "--stats must name a file of `prune observe`: it is missing; only --check-only and keeping all experts need none"
        )
    statistics = rows = None
    if stats is not None:
        statistics = Statistics.load(stats)
        check_statistics(statistics, checkpoint, layers, Path(stats))
        rows = statistics.combined(parse_weights(wish.source_weights))
    kept = _choose(checkpoint, layers, wish, statistics, rows)
    count_of = _counts(layers, statistics, rows)
    tables = {} if everything else _tables(checkpoint, kept, count_of)
    content = {
        "schema": SCHEMA,
        "model_type": checkpoint.family.model_type,
        "source_index_sha256": checkpoint.sha256,
        "stats_sha256": "" if stats is None else file_sha256(stats),
        "criterion": wish.criterion,
        "keep": wish.keep,
        "layers": {str(number): _layer_entry(kept[number], count_of.get(number)) for number in layers},
        "groups": wish.groups,
        "mtp": wish.mtp,
        "config_changes": config_changes(checkpoint, wish),
        "tid2eid": tables,
        "bytes": {"before": checkpoint.nbytes, "after": pruned_nbytes(checkpoint, kept, drop_mtp)},
        "warnings": [],
    }
    content["warnings"] = warnings_of(checkpoint, wish, content)
    return content


def check_statistics(statistics: Statistics, checkpoint: MoeCheckpoint, layers: Sequence[int], path: Path) -> None:
    """Refuse statistics of another model, or without a layer that is to be pruned.

    Raises:
        UserError: see above.
    """
    got = (statistics.model_type, statistics.model_sha256, statistics.num_experts, statistics.top_k)
    routing = checkpoint.routing
    want = (checkpoint.family.model_type, checkpoint.sha256, routing.experts, routing.top_k)
    if got != want:
        names = ("model_type", "index sha256", "experts", "top_k")
        name, a, b = next((n, a, b) for n, a, b in zip(names, got, want) if a != b)
        raise UserError(
            f"--stats must be of this model: {path} has {name} {str(a)[:16]}, {checkpoint.path} {str(b)[:16]}; observe this model"
        )
    missing = sorted(set(layers) - set(statistics.layers))
    if missing:
        mtp = checkpoint.layers[missing[0]].mtp
        remedy = (
            "use --mtp drop: transformers never runs an MTP layer, an engine's recording may"
            if mtp
            else "observe again"
        )
        raise UserError(f"--stats must have every layer that is pruned: {path} lacks layer {missing[0]}; {remedy}")


def config_changes(checkpoint: MoeCheckpoint, wish: Wish) -> dict[str, list]:
    """Keys of config.json that change: [old, new]; nothing else may differ afterwards."""
    new: dict[str, int | float] = {"n_routed_experts": wish.keep}
    if wish.mtp == "drop" and checkpoint.config.get(MTP_COUNT):
        new[MTP_COUNT] = 0
    if wish.groups == "flatten" and checkpoint.routing.n_group > 1:
        new |= {"n_group": 1, "topk_group": 1}
    if wish.routed_scaling_factor is not None:
        new["routed_scaling_factor"] = wish.routed_scaling_factor
    config = checkpoint.config
    return {key: [config.get(key, ABSENT), value] for key, value in new.items() if config.get(key, ABSENT) != value}


def _choose(
    checkpoint: MoeCheckpoint,
    layers: list[int],
    wish: Wish,
    statistics: Statistics | None,
    rows: SourceStatistics | None,
) -> dict[int, list[int]]:
    if rows is None:
        return {number: list(range(checkpoint.routing.experts)) for number in layers}
    score_LE = criteria.scores(rows, wish.criterion)
    protected = parse_protected(wish.protect, layers)
    n_group = checkpoint.routing.n_group if wish.groups == "keep" else 1
    row_of = {number: row for row, number in enumerate(statistics.layers)}
    return {n: criteria.select(score_LE[row_of[n]], wish.keep, n_group, protected.get(n, ())) for n in layers}


def _counts(layers: list[int], statistics: Statistics | None, rows: SourceStatistics | None) -> dict[int, torch.Tensor]:
    if rows is None:
        return {}
    row_of = {number: row for row, number in enumerate(statistics.layers)}
    return {number: rows.count[row_of[number]].double() for number in layers}


def _layer_entry(kept: list[int], count_E: torch.Tensor | None) -> dict:
    """A layer of plan.json: coverage is the share of the observed choices that the kept experts made."""
    entry: dict = {"kept": kept, "old_to_new": {str(old): new for new, old in enumerate(kept)}}
    if count_E is None:
        return entry | {"coverage": 1.0, "never_routed": []}
    total = float(count_E.sum())
    coverage = float(count_E[kept].sum()) / total if total else 0.0
    return entry | {"coverage": coverage, "never_routed": (count_E == 0).nonzero().flatten().tolist()}


def _tables(
    checkpoint: MoeCheckpoint, kept: dict[int, list[int]], count_of: dict[int, torch.Tensor]
) -> dict[str, dict]:
    """What plan.json says of each hash layer: loads that decide, and the table that must come out."""
    found = {}
    for number, experts in kept.items():
        layer = checkpoint.layers[number]
        if layer.table is None:
            continue
        table = checkpoint.load(layer.table)
        load = tid2eid.expert_load(table, count_of.get(number), checkpoint.routing.experts)
        result = tid2eid.rewrite(table, checkpoint.load(layer.router), experts, load)
        found[str(number)] = {
            "moved_to": {str(old): new for old, new in result.moved_to.items()},
            "load": load.tolist(),
            "load_cap": tid2eid.LOAD_CAP,
            "max_load": result.max_load,
            "repaired_entries": result.repaired,
            "mean_similarity": result.mean_similarity,
            "sha256": tid2eid.table_sha256(result.table),
        }
    return found
