"""Two sides against each other: log-probs, routes, selections, weights and, for the record, every module."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_patch.diagnosis.parity.judge import Pack
from megatron_patch.diagnosis.parity.local import MODULES, Distance, LocalJudge, margins, scored_pairs
from megatron_patch.diagnosis.parity.records import Dump, selected_of
from megatron_patch.errors import UserError

WORST_TOKENS = 10
ADDED_BY_NATIVE = ("self_attn.q_a_proj.weight", "self_attn.q_a_layernorm.weight", "self_attn.q_b_proj.weight")


def require_same_tokens(a: Dump, b: Dump) -> None:
    """Refuse two dumps of different text.

    Raises:
        UserError: tokens or document boundaries differ.
    """
    for name in ("tokens", "cu_seqlens"):
        if not torch.equal(a.tensors[name].long(), b.tensors[name].long()):
            raise UserError(
                f"two sides are compared on the same tokens: those of {a.side} ({a.source}) and {b.side} ({b.source}) differ in {name}; "
                "dump one of them again with --tokens-of the other"
            )


def module_rows(a: Dump, b: Dump) -> list[dict[str, Any]]:
    """Both sides' modules, each side on its own inputs all the way up, so that differences accumulate.

    `non_finite` counts values that either side has as NaN or infinity; the differences are of the others.
    """
    rows: list[dict[str, Any]] = []
    scored = scored_pairs(Pack.of(a.cu_seqlens), a.cu_seqlens, a.topk or b.topk)
    for layer in sorted(set(a.layers) & set(b.layers)):
        ours, theirs = a.layer(layer), b.layer(layer)
        for module in MODULES:
            if module not in ours or module not in theirs:
                continue
            x, y = ours[module], theirs[module]
            if module == "indexer":
                x, y = x[scored], y[scored]
            if x.numel():
                rows.append({"layer": layer, "module": module, **_difference(x, y)})
    return rows


def _difference(a: Tensor, b: Tensor) -> dict[str, float]:
    a, b = a.double().flatten(), b.double().flatten()
    both = a.isfinite() & b.isfinite()
    a, b = a[both], b[both]
    norms = a.norm() * b.norm()
    cosine = float(a @ b / norms) if norms else float(torch.equal(a, b))
    largest = float((a - b).abs().max()) if len(a) else 0.0
    return {"max_abs": largest, "rel": Distance.between(a, b).relative, "cos": cosine, "non_finite": int((~both).sum())}


def log_probs(a: Dump, b: Dump, texts: list[str] | None = None) -> dict[str, Any]:
    """Absolute differences in nats; k3 is mean(exp(d) - d - 1), an unbiased estimate of KL(a || b) from a's tokens.

    `worst`: the tokens with the largest differences.
    """
    predicts = a.tensors["predicts"] & b.tensors["predicts"]
    at = predicts.nonzero().flatten()
    ours, theirs = (d.tensors["log_probs"].double()[at] for d in (a, b))
    gap = (theirs - ours).abs()
    d = theirs - ours
    order = gap.argsort(descending=True)[:WORST_TOKENS].tolist()
    worst = [
        {
            "position": int(at[i]) + 1,
            "token": int(a.tokens[at[i] + 1]),
            "text": texts[int(at[i]) + 1] if texts else None,
            "a": float(ours[i]),
            "b": float(theirs[i]),
        }
        for i in order
    ]
    return {
        "mean": float(gap.mean()),
        "p99": float(gap.kthvalue(max(1, round(0.99 * len(gap)))).values),  # torch.quantile refuses more than 16M values
        "max": float(gap.max()),
        "k3": float((d.exp() - d - 1).mean()),
        "tokens": len(gap),
        "worst": worst,
    }


def router(a: Dump, b: Dump, judge: LocalJudge | None) -> dict[str, Any]:
    """Share of tokens (over layers) that both send to the same experts, and the smallest relative margin at the k-th.

    `flip_margin`: the largest margin among tokens that go elsewhere, on the first side's inputs. A flip at a margin
    that rounding reaches is no fault; one at a large margin is.
    """
    same = tokens = 0
    smallest, flips = float("inf"), [0.0]
    for layer in sorted(set(a.layers) & set(b.layers)):
        ours, theirs = a.layer(layer), b.layer(layer)
        if "router" not in ours or "router" not in theirs:
            continue
        equal = ((ours["router"] > 0) == (theirs["router"] > 0)).all(-1)
        same, tokens = same + int(equal.sum()), tokens + len(equal)
        if judge is not None and "post_norm" in ours:
            choice = judge.judge(torch.float64).router(ours["post_norm"], judge.weights(layer))[1]
            margin = margins(choice, judge.shape.experts_per_token)
            smallest = min(smallest, float(margin.min()))
            flips += margin[~equal].tolist()
    return {
        "agreement": same / tokens if tokens else None,
        "tokens": tokens,
        "min_margin": smallest if smallest < float("inf") else None,
        "flip_margin": max(flips) if tokens and judge is not None else None,
    }


def index(dumps: Iterable[Dump]) -> dict[str, Any]:
    """Agreement of the selections, ties at their boundary, and picks that no query may make.

    `tested` is False while every document fits into top-k: all keys are selected then, whatever the indexer says.
    `ties`: rows of the first side whose k-th score equals the next one. `per_layer` holds the Jaccard means.
    """
    a, b = dumps
    longest = int(a.cu_seqlens.diff().max())
    topk = a.topk or b.topk
    pack = Pack.of(a.cu_seqlens)
    overlaps, ties, per_layer = [], 0, {}
    wrong = [wrong_picks(dump, pack) for dump in (a, b)]
    long_rows = pack.position >= (topk or 0)
    for layer in sorted(set(a.layers) | set(b.layers)):
        chosen = [selected_of(d.layer(layer)["indices"]) for d in (a, b) if "indices" in d.layer(layer)]
        if len(chosen) == 2 and long_rows.any():
            both, either = (chosen[0] & chosen[1]).sum(-1), (chosen[0] | chosen[1]).sum(-1)
            jaccard = (both / either.clamp_min(1))[long_rows]
            overlaps.append(jaccard)
            per_layer[layer] = float(jaccard.mean())
        if "indexer" in a.layer(layer):
            ties += _ties(a.layer(layer)["indexer"], pack, topk, long_rows)
    return {
        "tested": topk is not None and longest > topk,
        "jaccard": float(torch.cat(overlaps).mean()) if overlaps else None,
        "ties": ties,
        "future": sum(future for future, _ in wrong),
        "cross_doc": sum(cross for _, cross in wrong),
        "per_layer": per_layer,
    }


def wrong_picks(dump: Dump, pack: Pack) -> tuple[int, int]:
    """(later positions, positions of other documents) among the keys that one side selected: no query may have either."""
    later = torch.ones_like(pack.allowed).triu(1)
    future = cross = 0
    for layer in dump.layers:
        if "indices" in dump.layer(layer):
            wrong = selected_of(dump.layer(layer)["indices"]) & ~pack.allowed
            future, cross = future + int((wrong & later).sum()), cross + int((wrong & ~later).sum())
    return future, cross


def sparse_on_one_side(a: Dump, b: Dump) -> list[int]:
    """Layers in which one side attends to top-k keys and the other to all, if any query of the pack has more."""
    if not (Pack.of(a.cu_seqlens).position >= (a.topk or b.topk or len(a.tokens))).any():
        return []
    recorded = [n for n in sorted(set(a.layers) & set(b.layers)) if "attention" in a.layer(n) and "attention" in b.layer(n)]
    return [n for n in recorded if ("indices" in a.layer(n)) != ("indices" in b.layer(n))]


def _ties(scores_TT: Tensor, pack: Pack, topk: int, long_rows: Tensor) -> int:
    if not long_rows.any():
        return 0
    top = scores_TT.masked_fill(~pack.allowed, -torch.inf)[long_rows].topk(topk + 1, dim=-1).values
    return int((top[:, topk - 1] == top[:, topk]).sum())


def weights(a: Dump, b: Dump, max_abs: float | None = None) -> dict[str, Any]:
    """Names and digests of both sides. A native export's query latents of base layers stand for `q_proj`.

    Args:
        max_abs: the largest difference of a value, where both sides' values were at hand.
    """
    if not a.weights or not b.weights:
        return {"missing": [], "extra": [], "differing": [], "max_abs": max_abs, "frozen_bit_equal": None, "compared": False}
    ours, theirs = dict(a.weights), dict(b.weights)
    for name in [n for n in ours if n.endswith("self_attn.q_proj.weight") and n not in theirs]:
        stem = name.removesuffix("self_attn.q_proj.weight")
        if theirs.get(stem + "self_attn.q_b_proj.weight") == ours[name]:  # the same matrix behind a latent that is the input
            del ours[name]
            for added in [n for n in theirs if n.startswith(stem) and (n.removeprefix(stem) in ADDED_BY_NATIVE or ".indexer." in n)]:
                del theirs[added]
    differing = sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])
    trained = set(a.trained) | set(b.trained)
    frozen = [name for name in ours if name not in trained]
    return {
        "missing": sorted(ours.keys() - theirs.keys()),
        "extra": sorted(theirs.keys() - ours.keys()),
        "differing": differing,
        "max_abs": max_abs,
        "frozen_bit_equal": all(ours[name] == theirs.get(name) for name in frozen) if trained else not differing,
        "compared": True,
    }
