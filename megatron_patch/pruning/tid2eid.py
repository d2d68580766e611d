"""Hash-routed layers: the table that names the experts of each token id, rewritten for the experts that are kept.

A dropped expert's tokens go to the survivor with the most similar router row (cosine of the rows before pruning), as long
as that one's load stays under a cap; a row then gets other similar survivors where it would name one twice. One loader
takes repeated experts silently, another refuses them, and an id out of range stops a device.

Suffixes: V vocabulary, K experts per token, E experts before and N after pruning, H hidden.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LOAD_CAP = 1.5  # a survivor takes tokens until its load is this many times the mean of the survivors
_DECIMALS = 6  # similarities are rounded, so that the last bits of another machine's sums change no order


@dataclass(frozen=True)
class Rewritten:
    """A table after pruning.

    Attributes:
        table: [V, K] in the old table's dtype, new expert numbers, distinct in each row.
        moved_to: dropped expert -> survivor, old numbers.
        repaired: entries that were given yet another survivor.
        max_load: largest load of a survivor, in means of the survivors.
        mean_similarity: cosine between dropped experts and the survivors that took their tokens, mean over entries.
    """

    table: Tensor
    moved_to: dict[int, int]
    repaired: int
    max_load: float
    mean_similarity: float


def expert_load(table_VK: Tensor, count_E: Tensor | None, experts: int) -> Tensor:
    """Load of each expert, float64 [E]: its observed tokens and, since a token id never observed needs a place too, one
    for each of the table's entries that name it.
    """
    entries_E = torch.bincount(table_VK.reshape(-1).long(), minlength=experts).double()
    return entries_E if count_E is None else entries_E + count_E.double()


def rewrite(table_VK: Tensor, router_EH: Tensor, kept: list[int], load_E: Tensor) -> Rewritten:
    """The table for the experts kept.

    Args:
        table_VK: expert ids of each token id.
        router_EH: rows of the router before pruning.
        kept: experts that stay, ascending; at least K. With all of them the table comes back unchanged.
        load_E: load of each expert, of `expert_load`.
    """
    experts, kept_N = len(router_EH), np.array(kept)
    old_VK = table_VK.long().numpy()
    similarity_EN = _cosine(router_EH, kept_N)
    order_EN = np.argsort(-similarity_EN, axis=1, kind="stable")  # survivors of each expert, the most similar first
    load = load_E.double().numpy()
    cap = LOAD_CAP * load.sum() / len(kept)

    new_of = np.full(experts, -1)
    new_of[kept_N] = np.arange(len(kept))
    load_N = load[kept_N].copy()
    dropped = sorted((e for e in range(experts) if new_of[e] < 0), key=lambda e: (-load[e], e))
    for expert in dropped:  # the busiest first: there is still room at its nearest survivor
        new_of[expert] = _place(order_EN[expert], load_N, load[expert], cap, set())
        load_N[new_of[expert]] += load[expert]

    entries = np.bincount(old_VK.reshape(-1), minlength=experts)
    per_entry = np.where(entries > 0, load / np.maximum(entries, 1), 0.0)
    new_VK = new_of[old_VK]
    repaired = _repair(new_VK, old_VK, new_of, kept_N, order_EN, load_N, per_entry, cap)
    moved = ~np.isin(old_VK, kept_N)
    similarity = similarity_EN[old_VK[moved], new_VK[moved]]
    return Rewritten(
        table=torch.from_numpy(new_VK).to(table_VK.dtype),
        moved_to={int(e): int(kept_N[new_of[e]]) for e in sorted(dropped)},
        repaired=repaired,
        max_load=float(load_N.max() / max(load_N.mean(), 1e-30)),
        mean_similarity=float(similarity.mean()) if moved.any() else 1.0,
    )


def faults(table_VK: Tensor, experts: int) -> str | None:
    """What is wrong with a table for `experts` experts, or None: ids out of range, or an expert twice in a row."""
    table = table_VK.long()
    outside = ((table < 0) | (table >= experts)).any(1).nonzero()
    if len(outside):
        row = int(outside[0])
        return f"{len(outside)} rows name experts out of 0 to {experts - 1}, the first is token {row}: {table[row].tolist()}"
    twice = (table.sort(1).values.diff(dim=1) == 0).any(1).nonzero()
    if len(twice):
        row = int(twice[0])
        return f"{len(twice)} rows name an expert twice, the first is token {row}: {table[row].tolist()}"
    return None


def table_sha256(table_VK: Tensor) -> str:
    """SHA-256 of the ids as little-endian int64, hex."""
    return hashlib.sha256(table_VK.long().contiguous().numpy().astype("<i8").tobytes()).hexdigest()


def _cosine(router_EH: Tensor, kept_N: np.ndarray) -> np.ndarray:
    """Cosine of each expert's row with each survivor's, rounded; [E, N]."""
    rows = router_EH.double()
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return np.round((rows @ rows[torch.from_numpy(kept_N)].T).numpy(), _DECIMALS) + 0.0


def _place(order: np.ndarray, load_N: np.ndarray, extra: float, cap: float, taken: set[int]) -> int:
    """The first survivor in `order` that is not taken and has room, else the least loaded one."""
    free = [n for n in order.tolist() if n not in taken]
    roomy = next((n for n in free if load_N[n] + extra <= cap), None)
    return roomy if roomy is not None else min(free, key=lambda n: (load_N[n], n))


def _repair(
    new_VK: np.ndarray,
    old_VK: np.ndarray,
    new_of: np.ndarray,
    kept_N: np.ndarray,
    order_EN: np.ndarray,
    load_N: np.ndarray,
    per_entry: np.ndarray,
    cap: float,
) -> int:
    """Make the rows distinct in place, and `load_N` with them; returns the number of entries changed.

    Entries whose expert is kept stay; of the others the first of equal ones stays.
    """
    ordered = np.sort(new_VK, axis=1)
    survivors = set(kept_N.tolist())
    repaired = 0
    for row in np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(1)).tolist():
        old = old_VK[row].tolist()
        taken: set[int] = set()
        again: list[int] = []
        for slot in sorted(range(len(old)), key=lambda s: (old[s] not in survivors, s)):
            new = int(new_VK[row, slot])
            if new in taken:
                again.append(slot)
            taken.add(new)
        for slot in again:
            expert = old[slot]
            new = _place(order_EN[expert], load_N, per_entry[expert], cap, taken)
            load_N[new_VK[row, slot]] -= per_entry[expert]
            load_N[new] += per_entry[expert]
            new_VK[row, slot] = new
            taken.add(new)
            repaired += 1
    return repaired
