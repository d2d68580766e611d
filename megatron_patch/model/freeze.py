"""Freeze the base, and prove afterwards that it did not move."""

import hashlib
import re
from collections.abc import Mapping, Sequence

from torch import nn

from megatron_patch.io.hashes import tensor_sha256
from megatron_patch.model.layer_pattern import DSA
from megatron_patch.model.names import global_name, trainable


def freeze_base(model: nn.Module, pattern: tuple[str, ...]) -> None:
    """Leave only the DSA layers' parameters trainable. Call before DDP is wrapped around the model."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_in_dsa_layer(name, pattern))


def freeze_all_but_indexers(model: nn.Module) -> None:
    """Leave only the indexers of a base's layers trainable."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".self_attention.indexer." in name)


def _in_dsa_layer(name: str, pattern: tuple[str, ...]) -> bool:
    match = re.match(r"(?:module\.)*decoder\.layers\.(\d+)\.", name)
    return match is not None and pattern[int(match[1])] == DSA


def frozen_hashes(model: nn.Module, pattern: tuple[str, ...], experts: range | None = None) -> dict[str, str]:
    """Global name -> hash of each of this rank's frozen parameters, and of all buffers outside the DSA layers.

    Buffers count because a router's statistics are buffers, and have moved in frozen layers elsewhere
    (Megatron-LM issue 7021).

    Args:
        experts: global numbers of the experts that this rank holds; None: all.
    """
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    frozen += [(name, b) for name, b in model.named_buffers() if not _in_dsa_layer(name, pattern)]
    return {global_name(name, experts): tensor_sha256(tensor) for name, tensor in frozen}


def trained_hashes(model: nn.Module, experts: range | None = None) -> dict[str, str]:
    """Global name -> hash of each parameter that trains. Ranks that hold the same parameter hold the same values."""
    return {name: tensor_sha256(tensor) for name, tensor in trainable(model, experts).items()}


def combined_sha256(hashes: Mapping[str, str]) -> str:
    """One hash for all, whatever ranks they come from."""
    return hashlib.sha256("".join(f"{name} {sha256}\n" for name, sha256 in sorted(hashes.items())).encode()).hexdigest()


def frozen_sha256(model: nn.Module, pattern: tuple[str, ...]) -> str:
    """`combined_sha256` of the `frozen_hashes` of a model that lies whole on this rank."""
    return combined_sha256(frozen_hashes(model, pattern))


def merged_hashes(by_rank: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], tuple[int, int, str] | None]:
    """(every rank's hashes in one, (a rank, an earlier one, the name whose values they hold differently) or None)."""
    merged: dict[str, str] = {}
    holder: dict[str, int] = {}
    for rank, hashes in enumerate(by_rank):
        for name, sha256 in hashes.items():
            if merged.setdefault(name, sha256) != sha256:
                return merged, (rank, holder[name], name)
            holder.setdefault(name, rank)
    return merged, None
