"""A training run's --save directory without the training: random trained weights and a true manifest."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_patch.checkpoint.hf_mapping import base_indexer_mapping, sizes
from megatron_patch.checkpoint.manifest import LATEST_FILE, WEIGHTS_FILE, BaseReference, TrainingManifest
from megatron_patch.io.hashes import directory_identity, file_sha256
from megatron_patch.model.architecture import read_architecture
from tests.checkpoint.models import DSA, random_trained

PATTERN = ("mla",) * 3 + ("dsa",) * 2


def write_run(
    save: Path,
    base: Path,
    *,
    iteration: int = 20,
    dtype: torch.dtype = torch.float32,
    seed: int = 7,
    change=None,
    **fields,
) -> Path:
    """`change` edits the trained tensors, `fields` replace those of the manifest."""
    directory = save / f"iter_{iteration:07d}"
    directory.mkdir(parents=True)
    arch = read_architecture(base)
    trained = random_trained(arch, PATTERN, dtype, seed)
    if change is not None:
        change(trained)
    save_file(trained, directory / WEIGHTS_FILE)
    manifest = {
        "kind": "pretrain",
        "iteration": iteration,
        "consumed_samples": 160,
        "consumed_tokens": 10_000,
        "base": BaseReference(str(base), directory_identity(base)),
        "layer_pattern": PATTERN,
        "dsa": DSA,
        "q_rank": arch.hidden_size,
        "frozen_sha256": "f" * 64,
        "files": {WEIGHTS_FILE: file_sha256(directory / WEIGHTS_FILE)},
    }
    TrainingManifest(**(manifest | fields)).write(directory)
    (save / LATEST_FILE).write_text(str(iteration))
    return save


def write_indexers(save: Path, base: Path, *, std: float = 0.05, seed: int = 9) -> Path:
    """A --save directory of a run that trained the base's indexers; random values."""
    arch, generator = read_architecture(base), torch.Generator().manual_seed(seed)
    mapping = base_indexer_mapping(arch)
    shapes = mapping.shapes(sizes(arch, DSA))
    trained = {mapping.megatron_name[hf]: torch.randn(shape, generator=generator) * std for hf, shape in shapes.items()}

    def replace(tensors: dict) -> None:
        tensors.clear()
        tensors.update(trained)

    return write_run(save, base, change=replace, kind="base-indexers", layer_pattern=PATTERN[:3])
