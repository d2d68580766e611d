"""Freeze the base, and prove afterwards that it did not move."""

import hashlib
import re

import torch
from torch import nn

from megatron_patch.model.layer_pattern import DSA


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


def trained_sha256(model: nn.Module) -> str:
    """Hash of the trainable parameters: names, dtypes, shapes, bytes. Data-parallel ranks hold the same."""
    return _sha256([(name, p) for name, p in model.named_parameters() if p.requires_grad])


def frozen_sha256(model: nn.Module, pattern: tuple[str, ...]) -> str:
    """Hash of this rank's frozen parameters and of all buffers outside the DSA layers: names, dtypes, shapes, bytes.

    Buffers count because a router's statistics are buffers, and have moved in frozen layers elsewhere
    (Megatron-LM issue 7021).
    """
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    frozen += [(name, b) for name, b in model.named_buffers() if not _in_dsa_layer(name, pattern)]
    return _sha256(frozen)


def _sha256(named: list[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda item: item[0]):
        digest.update(f"{name.removeprefix('module.')} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
