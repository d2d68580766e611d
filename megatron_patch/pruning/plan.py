"""Make plan.json: check that the number of experts is feasible, score, choose, and say what it costs and saves."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_patch.errors import EXIT_OK, UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.publish import atomic_write_json
from megatron_patch.pruning import criteria, tid2eid
from megatron_patch.pruning.checkpoint import MTP_COUNT, MoeCheckpoint, read_config
from megatron_patch.pruning.families import family_of
from megatron_patch.pruning.feasibility import check_feasible, check_protected
from megatron_patch.pruning.plan_file import ABSENT, SCHEMA
from megatron_patch.pruning.plan_report import print_feasible, print_plan
from megatron_patch.pruning.shards import pruned_nbytes
from megatron_patch.pruning.statistics import SourceStatistics, Statistics

_ASCEND_EXPERTS = 256


@dataclass(frozen=True)
class Wish:
    """What is asked for.

    Attributes:
        keep: experts of each layer to keep.
        criterion: of `criteria.CRITERIA`.
        source_weights: SOURCE=WEIGHT entries.
        protect: LAYER:ID,ID entries.
        groups: "keep" (the same number in each group) or "flatten" (n_group = topk_group = 1).
        mtp: "drop" the MTP layers, or prune them by their own "scores".
        target: "any" or "ascend".
        ep: expert parallel size of the target.
    """

    keep: int
    criterion: str = "frequency"
    source_weights: tuple[str, ...] = ()
    protect: tuple[str, ...] = ()
    groups: str = "keep"
    mtp: str = "drop"
    target: str = "any"
    ep: int | None = None


def run(
    model: str | Path,
    wish: Wish,
    *,
    stats: str | Path | None = None,
    output: str | Path | None = None,
    check_only: bool = False,
    device_memory_gb: float | None = None,
) -> int:
    """`dsa-upcycle prune plan`: check, and unless `check_only` write the plan and print what it means.

    Args:
        model: the model's directory.
        wish: what is asked for.
        stats: file of `prune observe`; not needed where all experts are kept.
        output: plan.json to write.
        check_only: stop after the check of feasibility, which reads config.json alone.
        device_memory_gb: also say how many devices of so many 1e9 bytes the weights need.

    Returns:
        the exit code.

    Raises:
        UserError: an argument is wrong, the number is infeasible, the checkpoint is damaged, the statistics are another model's.
    """
    check(model, wish)
    if check_only:
        print_feasible(Path(model), wish)
        return EXIT_OK
    if output is None:
        raise UserError(
            "--output must name the plan to write: it is missing; give e.g. --output plan.json, or --check-only"
        )
    if device_memory_gb is not None and device_memory_gb <= 0:
        raise UserError(f"--device-memory-gb must be above 0: {device_memory_gb}; give e.g. 64")
    content = make_plan(model, wish, stats)
    atomic_write_json(output, content)
    print_plan(content, Path(output), device_memory_gb)
    return EXIT_OK


def check(model: str | Path, wish: Wish) -> None:
    """Everything that can be refused from config.json alone.

    Raises:
        UserError: unknown family, infeasible number, protect list that does not fit, target without --ep.
    """
    config = read_config(Path(model))
    family = family_of(config)
    routing = family.routing(config)
    for flag, value, allowed in (
        ("--criterion", wish.criterion, criteria.CRITERIA),
        ("--mtp", wish.mtp, ("drop", "scores")),
        ("--target", wish.target, ("any", "ascend")),
    ):
        if value not in allowed:
            raise UserError(f"{flag} must be one of {', '.join(allowed)}: {value!r}; give one of them")
    if wish.target == "ascend" and wish.ep is None:
        raise UserError(
            "--target ascend must come with --ep, the number of NPUs that share the experts: it is missing; give e.g. --ep 32"
        )
    check_feasible(routing, wish.keep, groups=wish.groups, ep=wish.ep)
    layers = family.moe_layers(config)
    if wish.mtp == "scores":
        layers += tuple(range(config["num_hidden_layers"], config["num_hidden_layers"] + (config.get(MTP_COUNT) or 0)))
    for layer, ids in criteria.parse_protected(wish.protect, layers).items():
        check_protected(routing, wish.keep, ids, layer, wish.groups)


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
        rows = statistics.combined(criteria.parse_weights(wish.source_weights))
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
    content["warnings"] = _warnings(checkpoint, wish, content)
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
    new: dict[str, int] = {"n_routed_experts": wish.keep}
    if wish.mtp == "drop" and checkpoint.config.get(MTP_COUNT):
        new[MTP_COUNT] = 0
    if wish.groups == "flatten" and checkpoint.routing.n_group > 1:
        new |= {"n_group": 1, "topk_group": 1}
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
    protected = criteria.parse_protected(wish.protect, layers)
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


def _warnings(checkpoint: MoeCheckpoint, wish: Wish, content: dict) -> list[dict]:
    found: list[tuple[str, str]] = []
    pruned = wish.keep < checkpoint.routing.experts
    layers = content["layers"]
    kept_unseen = {n: len(set(v["never_routed"]) & set(v["kept"])) for n, v in layers.items()}
    if any(kept_unseen.values()):
        worst = max(kept_unseen, key=lambda n: kept_unseen[n])
        found.append((
            "never_routed_kept",
            f"{sum(v > 0 for v in kept_unseen.values())} layers keep experts that the data never routed to ({kept_unseen[worst]} in layer "
            f"{worst}): nothing is known of these, observe more data or keep fewer",
        ))  # fmt: skip
    if any(set(v["never_routed"]) - set(v["kept"]) for v in layers.values()):
        found.append(
            (
                "never_routed_dropped",
                "experts that the data never routed to are dropped: unseen is not useless, other data may need them",
            )
        )
    if pruned and checkpoint.family.router == "softmax" and not checkpoint.family.keeps_mass(checkpoint.config):
        found.append((
            "softmax_mass",
            "the softmax loses the dropped experts from its denominator and is not renormalised: routed weights grow; `prune verify` "
            "prints by how much",
        ))  # fmt: skip
    if checkpoint.mtp_layers and wish.mtp == "drop":
        found.append(
            ("mtp_dropped", f"the MTP layers go ({len(checkpoint.mtp_layers)}): speculative decoding with them ends")
        )
    if wish.groups == "flatten" and checkpoint.routing.n_group > 1:
        found.append(
            (
                "groups_flattened",
                "tokens may choose from all groups: routing differs from the source's even where its experts are kept",
            )
        )
    if wish.target == "ascend" and checkpoint.family.router == "sigmoid" and wish.keep != _ASCEND_EXPERTS:
        found.append((
            "ascend_expert_count",
            f"a gating kernel for Ascend was reported to support {_ASCEND_EXPERTS} experts alone (vllm-ascend issue 5310): {wish.keep} may "
            "need another backend",
        ))  # fmt: skip
    over = [n for n, entry in content["tid2eid"].items() if entry["max_load"] > entry["load_cap"]]
    if over:
        found.append(
            (
                "hash_load",
                f"a survivor of layer {over[0]} carries more than {tid2eid.LOAD_CAP} times the mean load: its own tokens are that many, or no other had room",
            )
        )
    if any(entry["mean_similarity"] < 0.5 for entry in content["tid2eid"].values()):
        found.append(
            (
                "hash_similarity",
                "survivors that take over token ids in hash layers have unlike router rows (mean cosine under 0.5)",
            )
        )
    return [{"code": code, "text": text} for code, text in found]
