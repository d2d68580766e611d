"""Model FLOPs of a training step whose base is frozen: what the maths needs, recomputation not counted.

A matrix product costs 2 FLOPs per weight and token in the forward pass, 2 more for the gradient of its input and 2 more
for that of its weight. The frozen base needs the first alone, the frozen head above the DSA layers the first two, the DSA
layers all three, but their indexers hand no gradient to their inputs. Beside a base's layers (`base_indexers`) the indexers
alone train: the head needs the first, and attention's logits are computed once more for their target. Counted are matrix products; norms, softmax, RoPE and the embedding's look-up are not.
Source of the accounting: PaLM (Chowdhery et al., arXiv 2204.02311, appendix B), which counts nothing frozen.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_patch.model.architecture import Architecture, DsaSettings
from megatron_patch.model.layer_pattern import DSA
from megatron_patch.planning.parameters import parts

_NOT_PRODUCTS = ("embedding", "norms")


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one step, over all ranks."""

    frozen: int
    dsa: int
    head: int

    @property
    def total(self) -> int:
        return self.frozen + self.dsa + self.head


class FlopsCounter:
    """Counts the FLOPs of steps of one model.

    Args:
        arch: the base.
        pattern: attention of each layer, bottom to top.
        dsa: sizes of the indexers.
        base_indexers: whether each base layer has an indexer, and nothing else trains.
    """

    def __init__(self, arch: Architecture, pattern: tuple[str, ...], dsa: DsaSettings, base_indexers: bool = False):
        self._arch, self._dsa, self._base_indexers = arch, dsa, base_indexers
        self._base_layers = sum(kind != DSA for kind in pattern)
        self._dsa_layers = len(pattern) - self._base_layers
        found = [part for part in parts(arch, pattern, dsa) if part.name not in _NOT_PRODUCTS]
        self._head = sum(part.active for part in found if part.name == "head")
        self._indexer = sum(part.active for part in found if part.name == "indexer")
        if base_indexers:
            of_one = [part.active for part in parts(arch, (*pattern, DSA), dsa) if part.name == "indexer"]
            self._indexer = sum(of_one) * self._base_layers
        self._trained = sum(part.active for part in found if part.trainable and part.name != "indexer")
        self._frozen = sum(part.active for part in found if not part.trainable) - self._head

    @staticmethod
    def attention(arch: Architecture, dsa: DsaSettings, lengths: Sequence[int]) -> int:
        """FLOPs of a forward pass through one DSA layer's attention and index scores, projections left out."""
        causal = sum(n * (n + 1) // 2 for n in lengths)
        chosen = sum(_selected_pairs(n, dsa.index_topk) for n in lengths)
        return _pair(arch) * chosen + 2 * dsa.index_n_heads * dsa.index_head_dim * causal

    def __call__(self, lengths: Sequence[int], dense: bool, in_trunk: Sequence[int] | None = None) -> StepFlops:
        """FLOPs of a step over documents of these lengths.

        Args:
            lengths: tokens of each document of the global batch.
            dense: the indexer's warm-up, in which DSA layers attend to all keys.
            in_trunk: of the documents that the base's layers compute, where a trunk cache gives the others; None: all.
        """
        tokens = sum(lengths)
        causal = sum(n * (n + 1) // 2 for n in lengths)  # (query, key) pairs
        topk = self._dsa.index_topk
        chosen = causal if dense else sum(_selected_pairs(n, topk) for n in lengths)
        # Scores and values: 2 FLOPs per pair, head and dimension.
        pair = _pair(self._arch)
        index_pair = 2 * self._dsa.index_n_heads * self._dsa.index_head_dim
        if self._base_indexers:
            logits = 2 * self._arch.num_heads * self._arch.qk_head_dim
            return StepFlops(
                frozen=2 * self._frozen * tokens + self._base_layers * pair * causal,
                dsa=2 * 2 * self._indexer * tokens + self._base_layers * (3 * index_pair + logits) * causal,
                head=2 * self._head * tokens,
            )
        through = lengths if in_trunk is None else in_trunk
        through_pairs = sum(n * (n + 1) // 2 for n in through)
        return StepFlops(
            frozen=2 * self._frozen * sum(through) + self._base_layers * pair * through_pairs,
            dsa=2 * (3 * self._trained + 2 * self._indexer) * tokens
            + 3 * self._dsa_layers * (pair * chosen + index_pair * causal),
            head=2 * 2 * self._head * tokens,
        )


def _pair(arch: Architecture) -> int:
    """FLOPs of scores and values of one query and one key, over all heads."""
    return 2 * arch.num_heads * (arch.qk_head_dim + arch.v_head_dim)


def _selected_pairs(length: int, topk: int) -> int:
    """Sum over queries of min(keys before it and itself, topk)."""
    full = max(length - topk, 0)
    rising = length - full
    return rising * (rising + 1) // 2 + full * topk
