"""Which known fault explains a module that diverges: each is planted in the judge, and the gap must close.

A fault is named when the side agrees with the judge *with* the fault, in every layer where the module diverges, as well
as rounding allows. So a name is evidence, not a guess from symptoms; a fault that nobody has described stays unnamed.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from megatron_patch.diagnosis.parity.judge import RIGHT, Variant
from megatron_patch.diagnosis.parity.local import Local, LocalJudge
from megatron_patch.faults import Fault

# So much of the gap must close if rounding does not explain all that is left: two faults may meet in one module.
CLOSES = 0.1
MOST_SWAPPABLE = 12  # experts between which a swap is looked for, pair by pair
CONFIRMED_LAYERS = 3


@dataclass(frozen=True)
class Suspect:
    """A fault, and what speaks for it; `left` is the share of the gap that remains."""

    fault: Fault
    side: str
    module: str
    evidence: str
    left: float


def _shifts() -> list[Variant]:
    return [replace(RIGHT, query_shift=shift) for shift in (1, -1)]


def _leaks() -> list[Variant]:
    return [replace(RIGHT, isolate=False, restart=restart) for restart in (False, True)]


def variants(judge: LocalJudge, row: Local) -> Iterator[tuple[Fault, Variant, str]]:
    """(fault, deviation, what is particular about it) that may explain a diverging module."""
    if row.module == "indexer":
        yield Fault.INDEXER_ROPE_INTERLEAVED, replace(RIGHT, index_rope="interleaved"), ""
        yield Fault.INDEXER_ROPE_DIMS_LAST, replace(RIGHT, index_rope="last"), ""
        yield Fault.Q_LATENT_UNNORMED, replace(RIGHT, index_latent_normed=False), ""
        yield Fault.K_NORM_EPS, replace(RIGHT, k_norm_eps=1e-5), ""
        yield Fault.K_NORM_NO_BIAS, replace(RIGHT, k_norm_bias=False), ""
        yield from ((Fault.POSITIONS_OFF_BY_ONE, v, f"queries at {v.query_shift:+d}") for v in _shifts())
    elif row.module == "attention":
        yield from _mscale_variants(judge)
        yield from ((Fault.POSITIONS_OFF_BY_ONE, v, f"queries at {v.query_shift:+d}") for v in _shifts())
        yield from ((Fault.ATTENTION_LEAKS_DOCUMENTS, v, "the pack as one document") for v in _leaks())
    elif row.module == "router":
        yield Fault.ROUTER_BF16, replace(RIGHT, router_rounds="inputs"), "inputs, weights and logits"
        yield Fault.ROUTER_BF16, replace(RIGHT, router_rounds="logits"), "logits alone"
        yield Fault.ROUTER_BIAS_MISSING, replace(RIGHT, router_bias=False), ""
        if judge.shape.router_score == "softmax":
            for renormalise in (False, True):
                text = "renormalised" if renormalise else "not renormalised"
                yield Fault.SIGMOID_ROUTER, replace(RIGHT, router_score="sigmoid", renormalise=renormalise), text
    elif row.module == "experts":
        yield from _swaps(judge, row)
    elif row.module == "shared":
        factor = _factor(judge, row)
        yield Fault.SHARED_EXPERT_SCALED, replace(RIGHT, shared_factor=factor), f"factor {factor:.4f}"


def _mscale_variants(judge: LocalJudge) -> Iterator[tuple[Fault, Variant, str]]:
    """Implementations differ in what mscale_all_dim = 0 does to cosines and sines beside the softmax scale."""
    rope = judge.shape.rope
    if rope.kind != "yarn":
        return
    plain = 0.1 * torch.tensor(rope.factor).log().item()
    for mscale, text in ((None, ""), (plain * rope.mscale + 1, "and RoPE scaled by mscale"), (plain + 1, "and RoPE scaled by 0.1 ln(factor) + 1")):
        yield Fault.MSCALE_ALL_DIM_0, replace(RIGHT, softmax_mscale=False, rope_mscale=mscale), text


def _swaps(judge: LocalJudge, row: Local) -> Iterator[tuple[Fault, Variant, str]]:
    """Pairs among the experts that only tokens with a wrong result were sent to."""
    records, w = judge.dump.layer(row.layer), judge.weights(row.layer)
    truth = judge.computed("experts", records, w, judge.judge(torch.float64))
    gap = (records["experts"].double() - truth).norm(dim=-1) / truth.norm(dim=-1).clamp_min(1e-30)
    wrong, used = gap > row.limit, records["router"] > 0
    candidates = (used.any(0) & ~used[~wrong].any(0)).nonzero().flatten().tolist()
    # An expert that no token was sent to may be one of the two: the other's tokens then have its weights.
    candidates += (~used.any(0)).nonzero().flatten().tolist()
    for a, b in itertools.combinations(sorted(candidates)[:MOST_SWAPPABLE], 2):
        yield Fault.EXPERTS_SWAPPED, replace(RIGHT, expert_map={a: b, b: a}), f"experts {a} and {b}"


def _factor(judge: LocalJudge, row: Local) -> float:
    """The factor on the shared experts' output that fits best."""
    records = judge.dump.layer(row.layer)
    truth = judge.computed("shared", records, judge.weights(row.layer), judge.judge(torch.float64)).flatten()
    return float(records["shared"].double().flatten() @ truth / (truth @ truth))


def suspects_of(judge: LocalJudge, rows: list[Local]) -> list[Suspect]:
    """The faults that explain one side's diverging modules, the best first; each module kind is asked once."""
    kinds: dict[str, list[Local]] = {}
    for row in rows:
        if row.diverges:
            kinds.setdefault(row.module, []).append(row)
    best: dict[Fault, Suspect] = {}
    for diverging in kinds.values():
        for fault, variant, detail in variants(judge, diverging[0]):
            found = _test(judge, fault, variant, detail, diverging[:CONFIRMED_LAYERS])
            if found is not None and (fault not in best or found.left < best[fault].left):
                best[fault] = found
    order = list(kinds)  # by the lowest layer that diverges
    return sorted(best.values(), key=lambda s: (order.index(s.module), s.left))


def _test(judge: LocalJudge, fault: Fault, variant: Variant, detail: str, rows: list[Local]) -> Suspect | None:
    """The fault as a suspect, if the side is near the judge with it in all of `rows`."""
    planted = [judge.compare(row.layer, row.module, judge.dump.layer(row.layer), variant) for row in rows]
    left = max(p.relative / row.relative for p, row in zip(planted, rows, strict=True))
    if not (left < 1 and all(not p.diverges for p in planted)) and not left <= CLOSES:  # NaN closes nothing
        return None
    row = rows[0]
    text = (
        f"layer {row.layer} {row.module}: the {judge.dump.side} is {row.relative:.1e} from the definition, "
        f"{planted[0].relative:.1e} with this fault{f' ({detail})' if detail else ''}"
    )
    return Suspect(fault, judge.dump.side, row.module, text, left)
