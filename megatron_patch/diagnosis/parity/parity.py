"""The verdict on two sides: what `parity.json` holds."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_patch.diagnosis.parity import compare
from megatron_patch.diagnosis.parity.judge import Pack
from megatron_patch.diagnosis.parity.local import HEAD, Local, LocalJudge, first_diverging
from megatron_patch.diagnosis.parity.records import Dump
from megatron_patch.diagnosis.parity.suspects import Suspect, suspects_of
from megatron_patch.faults import FAULTS, Fault

SCHEMA = 1
PASS, FAIL, NOT_TESTED = "pass", "fail", "not_tested"
# A rollout engine gives log-probs alone. Above this mean difference (nats) RL runs were seen to drift; rl-report's bound too.
ROLLOUT_LIMIT = 0.01


@dataclass
class Findings:
    """Everything known about a pair."""

    a: Dump
    b: Dump
    judged: dict[str, list[Local]] = field(default_factory=dict)
    suspects: list[Suspect] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)


def examine(
    a: Dump,
    b: Dump,
    weights: Path | None,
    *,
    texts: list[str] | None = None,
    max_abs: float | None = None,
    progress: bool = True,
) -> Findings:
    """Compare two sides and look for the fault.

    Args:
        a, b: of the same tokens.
        weights: Hugging Face directory from which modules are judged; None: the two are only compared.
        texts: of each token.
        max_abs: see `compare.weights`.

    Raises:
        UserError: the dumps are not of the same tokens.
    """
    compare.require_same_tokens(a, b)
    found = Findings(a, b)
    judges = {}
    if weights is not None:
        for dump in (a, b):
            if dump.layers and f"layers.{dump.layers[0]}.norm" in dump.tensors:
                judges[dump.side] = judge = LocalJudge(dump, weights)
                found.judged[dump.side] = judge(progress)
                found.suspects += suspects_of(judge, found.judged[dump.side])
    index = compare.index((a, b))
    found.suspects = _observed(found) + found.suspects
    first = _first(found)
    report = {
        "schema": SCHEMA,
        "inputs": {
            "tokens": len(a.tokens),
            "documents": len(a.cu_seqlens) - 1,
            "topk": a.topk or b.topk,
            "dtype": a.dtype,
            "a": {"side": a.side, "source": a.source, "dtype": a.dtype, "environment": a.environment},
            "b": {"side": b.side, "source": b.source, "dtype": b.dtype, "environment": b.environment},
        },
        "weights": compare.weights(a, b, max_abs),
        "modules": _with_local(compare.module_rows(a, b), found.judged),
        "first_divergence": first,
        "router": compare.router(a, b, next(iter(judges.values()), None)) | {"left_out": _left_out(found)},
        "index": index,
        "logprobs": compare.log_probs(a, b, texts),
        "self_test": {dump.side: dump.self_test for dump in (a, b) if dump.self_test is not None},
        "ablations": [],
        "suspected": [
            {"fault": s.fault.value, "side": s.side, "evidence": s.evidence, "text": FAULTS[s.fault].text} for s in found.suspects
        ],
    }
    report["verdict"], report["reasons"] = _verdict(found, report)
    found.report = finite(report)
    return found


def finite(value: Any) -> Any:
    """A report's value with null for numbers that JSON has not: a side that gives NaN must still get its report."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _left_out(found: Findings) -> int:
    """Tokens, over layers and sides, whose routing was not judged: at a margin that rounding reaches."""
    return sum(row.left_out for rows in found.judged.values() for row in rows)


def _observed(found: Findings) -> list[Suspect]:
    """Faults that are seen, not inferred: picks of other documents, and a selection that recomputation changes."""
    suspects = []
    for dump in (found.a, found.b):
        if cross := compare.wrong_picks(dump, Pack.of(dump.cu_seqlens))[1]:
            text = f"{cross} selected keys are of other documents"
            suspects.append(Suspect(Fault.ATTENTION_LEAKS_DOCUMENTS, dump.side, "indexer", text, 0.0))
        test = dump.self_test or {}
        if test.get("recompute_indices_equal") is False:
            text = "with gradients, the recomputed pass selects other keys than the forward pass"
            suspects.append(Suspect(Fault.STALE_TOPK_RECOMPUTE, dump.side, "recompute", text, 0.0))
    return suspects


def _first(found: Findings) -> dict[str, Any] | None:
    """The lowest module of either side that rounding does not explain; the side is named."""
    firsts = [(row, side) for side, rows in found.judged.items() if (row := first_diverging(rows))]
    if not firsts:
        return None
    order = {id(row): place for rows in found.judged.values() for place, row in enumerate(rows)}
    row, side = min(firsts, key=lambda item: (item[0].layer, order[id(item[0])]))
    return {"layer": row.layer, "module": row.module, "side": side, **_figures(row), "text": str(row)}


def _figures(row: Local) -> dict[str, Any]:
    return {
        "rel": row.relative,
        "limit": row.limit,
        "off_gain": row.off_gain,
        "gain_limit": row.gain_limit,
        "diverges": row.diverges,
    }


def _with_local(rows: list[dict[str, Any]], judged: dict[str, list[Local]]) -> list[dict[str, Any]]:
    """Add to each module what the judge found on each side: `local` {side: its figures}."""
    by_place = {(side, r.layer, r.module): r for side, found in judged.items() for r in found}
    for row in rows:
        local = {side: by_place.get((side, row["layer"], row["module"])) for side in judged}
        row["local"] = {side: _figures(r) for side, r in local.items() if r is not None}
    return rows


def _verdict(found: Findings, report: dict[str, Any]) -> tuple[str, list[str]]:
    """(verdict, why). A difference that accumulates through right modules is no failure: every module is judged alone."""
    reasons = []
    for key in ("missing", "extra", "differing"):
        if names := report["weights"][key]:
            reasons.append(f"weights: {len(names)} {key}, the first is {names[0]}")
    if first := report["first_divergence"]:
        place = "log-probs" if first["module"] == HEAD else f"layer {first['layer']} {first['module']}"
        reasons.append(f"{place} of the {first['side']}: {first['text']}")
    if broken := [row for row in report["modules"] if row["non_finite"]]:
        values = sum(row["non_finite"] for row in broken)
        reasons.append(f"{values} values are not finite, the first in layer {broken[0]['layer']} {broken[0]['module']}")
    for key, text in (("future", "later positions"), ("cross_doc", "other documents")):
        if report["index"][key]:
            reasons.append(f"index: {report['index'][key]} picks of {text}")
    if layers := compare.sparse_on_one_side(found.a, found.b):
        reasons.append(
            f"{len(layers)} layers (the first is {layers[0]}) attend to top-k keys on one side and to all on the other: one model "
            f"up to {report['inputs']['topk']} tokens only"
        )
    for side, test in report["self_test"].items():
        if not (test["indices_equal"] and test["recompute_indices_equal"]):
            reasons.append(f"self-test of the {side}: the selection changes when gradients are recorded")
    # Right modules on both sides that give other results all the same: what they were judged by is not the same model.
    exact = found.a.dtype == found.b.dtype == "float32" and not reasons
    unjudged = [d.side for d in (found.a, found.b) if d.side not in found.judged]
    if (unjudged or exact) and not report["logprobs"]["mean"] <= ROLLOUT_LIMIT:  # NaN is above
        reasons.append(f"log-probs differ by {report['logprobs']['mean']:.3f} nats on average, above {ROLLOUT_LIMIT}")
    if reasons:
        return FAIL, reasons
    if report["inputs"]["topk"] and not report["index"]["tested"]:
        return NOT_TESTED, [f"no document is longer than top-k = {report['inputs']['topk']}: give a larger --seq-length"]
    return PASS, []
