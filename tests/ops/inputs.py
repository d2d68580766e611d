"""Random inputs of the DSA op, and the op again in plain Python loops: slow, and nothing in common with the package."""

import math
from itertools import pairwise

import torch
from torch import Tensor

NAMES = ("query", "key", "value", "index_query", "index_key", "index_weights")


def make_inputs(
    lengths: list[int], *, dtype=torch.float64, heads=2, dim=5, value_dim=3, index_heads=3, index_dim=4, seed=0
) -> dict[str, Tensor]:
    """Keyword arguments of `dsa_attention` for documents of these lengths; the six tensors require gradients."""
    g = torch.Generator().manual_seed(seed)
    t = sum(lengths)
    shapes = ((t, heads, dim), (t, heads, dim), (t, heads, value_dim), (t, index_heads, index_dim), (t, index_dim))
    tensors = [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]
    weights = torch.randn(t, index_heads, generator=g, dtype=torch.float64) / math.sqrt(index_heads * index_dim)
    tensors.append(weights.to(torch.promote_types(dtype, torch.float32)))
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {**{n: x.requires_grad_() for n, x in zip(NAMES, tensors, strict=True)}, "cu_seqlens": ends}


def by_hand(inputs: dict[str, Tensor], *, topk: int, scale: float, stage: str) -> tuple[list, list, list, list]:
    """Per query, in Python floats: (out [H][V], KL, recall, sorted selected positions)."""
    q, k, v, iq, ik, iw = (inputs[n].detach().double().tolist() for n in NAMES)
    out, kls, recalls, sets = [], [], [], []
    ends = inputs["cu_seqlens"].tolist()
    for begin, end in pairwise(ends):
        for t in range(begin, end):
            causal = list(range(begin, t + 1))
            score = {s: sum(w * max(0.0, dot(a, ik[s])) for w, a in zip(iw[t], iq[t], strict=True)) for s in causal}
            chosen = sorted(sorted(causal, key=lambda s: (score[s], s), reverse=True)[:topk])
            attended = chosen if stage == "sparse" else causal
            heads, mass, recall = [], dict.fromkeys(attended, 0.0), 0.0
            for h in range(len(q[t])):
                logit = {s: scale * dot(q[t][h], k[s][h]) for s in causal}
                p = softmax({s: logit[s] for s in attended})
                dense = softmax(logit)
                recall += sum(dense[s] for s in chosen) / len(q[t])
                heads.append([sum(p[s] * v[s][h][i] for s in attended) for i in range(len(v[t][h]))])
                for s in attended:
                    mass[s] += p[s]
            total = sum(mass.values())
            guess = softmax({s: score[s] for s in attended})
            kls.append(sum(mass[s] / total * math.log(mass[s] / total / guess[s]) for s in attended if mass[s] > 0))
            out.append(heads)
            recalls.append(recall)
            sets.append(chosen)
    return out, kls, recalls, sets


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(x: dict[int, float]) -> dict[int, float]:
    top = max(x.values())
    e = {s: math.exp(v - top) for s, v in x.items()}
    return {s: v / sum(e.values()) for s, v in e.items()}


def as_sets(indices: Tensor) -> list[list[int]]:
    """Rows of an index tensor without the -1 tail; asserts that -1 stands only there."""
    rows = []
    for row in indices.tolist():
        used = [s for s in row if s >= 0]
        assert row == used + [-1] * (len(row) - len(used)), row
        rows.append(used)
    return rows
