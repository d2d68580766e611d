"""A training checkpoint and its base become one Hugging Face directory, all at once or not at all.

The base's shards are copied byte for byte; only the DSA layers' tensors are written anew.
"""

import os
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

import megatron_patch
from megatron_patch.checkpoint import export_files
from megatron_patch.checkpoint.hf_mapping import HybridMapping, dsa_names, hybrid_mapping, require_same_names, sizes
from megatron_patch.checkpoint.load_base import base_dtype
from megatron_patch.checkpoint.manifest import (
    WEIGHTS_FILE,
    TrainingManifest,
    iteration_directory,
    read_manifest,
    verify_files,
)
from megatron_patch.errors import UserError
from megatron_patch.io.hashes import file_sha256, identity_of, model_file_hashes
from megatron_patch.io.publish import atomic_directory, atomic_write_json, require_empty
from megatron_patch.io.safetensors_dir import INDEX_FILE, SINGLE_FILE, SafetensorsDir, SafetensorsFile
from megatron_patch.model.architecture import Architecture, read_architecture, read_config

SCHEMA = 1
MANIFEST_FILE = "upcycle_manifest.json"
SHARD_BYTES = 4 << 30
_COPY_BYTES = 1 << 26
_RENAMED_SINGLE = "model-base-00001-of-00001.safetensors"  # beside an index, readers would take model.safetensors alone


def export(
    checkpoint: str | Path,
    base: str | Path,
    output: str | Path,
    *,
    iteration: int | None = None,
    layout: str = "hybrid",
    base_shards: str = "copy",
    progress: bool = True,
) -> None:
    """Write the Hugging Face directory of an upcycled model.

    Args:
        checkpoint: a training run's --save directory.
        base: the Hugging Face directory that it was trained on.
        output: a new or empty directory.
        iteration: which checkpoint; None: the latest.
        layout: "hybrid": base layers as they are, DSA layers on top.
        base_shards: "copy" (on file systems that can, without using space twice) or "symlink" to the base's files.
        progress: show bars over the bytes on stderr.

    Raises:
        UserError: an argument is wrong, the checkpoint is damaged or belongs to another base, or holds other tensors
            than its layer pattern says.
    """
    base, output = Path(base), Path(output)
    if layout != "hybrid":
        raise UserError(
            f"--layout must be hybrid in this release: {layout!r}; native needs indexers in the base's layers"
        )
    if base_shards not in ("copy", "symlink"):
        raise UserError(f"--base-shards must be copy or symlink: {base_shards!r}; give one of them")
    require_empty(output)
    directory = iteration_directory(checkpoint, iteration)
    manifest = read_manifest(directory)
    arch = read_architecture(base)
    export_files.require_tokenizer(base)
    verify_files(directory, manifest, only=(WEIGHTS_FILE,))  # not the optimizer's state, which is larger
    hashes = model_file_hashes(base, progress=progress)
    _check_base(manifest, base, identity_of(hashes))
    mapping = _check_checkpoint(directory, manifest, arch)
    config = export_files.export_config(read_config(base), manifest.layer_pattern, manifest.dsa, manifest.q_rank)

    source, trained = SafetensorsDir(base), SafetensorsFile(directory / WEIGHTS_FILE)
    with atomic_directory(output) as partial:
        weight_map = _place_base(source, partial, base_shards, hashes, progress)
        new = _write_trained(trained, mapping, base_dtype(source), partial, progress)
        _write_index(partial, source, weight_map, new)
        atomic_write_json(partial / "config.json", config)
        export_files.copy_code(partial)
        notes = export_files.copy_texts(base, partial)
        export_files.write_readme(
            partial,
            name=output.absolute().name,
            base_name=base.absolute().name,
            pattern=manifest.layer_pattern,
            topk=manifest.dsa.index_topk,
            kind=manifest.kind,
            iteration=manifest.iteration,
        )
        known = {_target_name(name): sha256 for name, (_, sha256) in hashes.items() if name.endswith(".safetensors")}
        _write_manifest(partial, manifest, base, known)
    for note in notes:
        print(f"note: {note}")
    print(
        f"exported iteration {manifest.iteration} ({manifest.kind}) to {output}: {len(weight_map) + len(new)} tensors"
    )


def _check_checkpoint(directory: Path, manifest: TrainingManifest, arch: Architecture) -> HybridMapping:
    """The checkpoint's tensors are exactly those of its DSA layers, in the shapes of the base."""
    if manifest.q_rank != arch.hidden_size:
        raise UserError(
            f"the query latent must be as wide as the base: {directory} has {manifest.q_rank}, the base "
            f"{arch.hidden_size}; give the base that the checkpoint was trained on"
        )
    mapping = hybrid_mapping(arch, manifest.layer_pattern)
    trained = SafetensorsFile(directory / WEIGHTS_FILE)
    expected = dsa_names(mapping, arch)
    require_same_names(str(trained.path), expected, trained.names, "the checkpoint does not fit its own layer pattern")
    shapes = mapping.shapes(sizes(arch, manifest.dsa))
    for name, sources in expected.items():
        first = shapes[sources[0]]
        shape = (first[0] * len(sources), *first[1:])
        if trained.shape(name) != shape:
            raise UserError(
                f"shapes must agree: {name} in {trained.path} is {trained.shape(name)}, the base wants {shape}; "
                "give the base that the checkpoint was trained on"
            )
    return mapping


def _check_base(manifest: TrainingManifest, base: Path, identity: str) -> None:
    if manifest.base.sha256 != identity:
        raise UserError(
            f"--base must be the base that the checkpoint was trained on: it was {manifest.base.path} "
            f"(sha256 {manifest.base.sha256[:12]}), {base} is another (sha256 {identity[:12]}); give the former"
        )


def _target_name(file: str) -> str:
    return _RENAMED_SINGLE if file == SINGLE_FILE else file


def _place_base(
    source: SafetensorsDir, output: Path, how: str, hashes: dict[str, tuple[int, str]], progress: bool
) -> dict[str, str]:
    """Copy or link the base's files and read the copies back; returns tensor name -> file."""
    total = 0 if how == "symlink" else 2 * sum(hashes[file][0] for file in source.files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="copy base", disable=not progress or not total) as bar:
        for file in source.files:
            target = output / _target_name(file)
            if how == "symlink":
                target.symlink_to((source.path / file).resolve())
                continue
            _copy(source.path / file, target, bar)
            if file_sha256(target, bar.update) != hashes[file][1]:
                raise OSError(
                    f"{target} differs from {source.path / file} after copying: the disk or its driver is at fault"
                )
    return {name: _target_name(source.file_of(name)) for name in source}


def _copy(source: Path, target: Path, bar: tqdm) -> None:
    """Copy in the kernel, which shares blocks where the file system can (XFS, btrfs); elsewhere plainly."""
    start = bar.n
    with open(source, "rb") as reader, open(target, "wb") as writer:
        try:
            while count := os.copy_file_range(reader.fileno(), writer.fileno(), _COPY_BYTES):
                bar.update(count)
        except OSError:  # not on this pair of file systems
            reader.seek(0)
            writer.seek(0)
            writer.truncate()
            bar.n = start
            while piece := reader.read(_COPY_BYTES):
                writer.write(piece)
                bar.update(len(piece))


def _write_trained(
    trained: SafetensorsFile, mapping: HybridMapping, dtype: torch.dtype, output: Path, progress: bool
) -> dict[str, tuple[str, int]]:
    """Write the DSA layers under Hugging Face names in the base's dtype; returns name -> (file, bytes)."""
    names = sorted(trained.names)
    parts = _group_by_bytes(trained, names, dtype)
    placed: dict[str, tuple[str, int]] = {}
    converted: Counter = Counter()
    with tqdm(total=len(names), unit="tensor", desc="write DSA layers", disable=not progress) as bar:
        for number, part in enumerate(parts, start=1):
            file = f"model-dsa-{number:05d}-of-{len(parts):05d}.safetensors"
            tensors: dict[str, Tensor] = {}
            for name in part:
                tensor = trained.load(name)
                if not tensor.isfinite().all():
                    raise UserError(
                        f"trained weights must be finite: {name} in {trained.path} is not; use an older iteration"
                    )
                converted[tensor.dtype] += 1
                # clones: safetensors refuses to write views that share memory
                tensors |= {hf: view.to(dtype, copy=True) for hf, view in mapping.to_hf(name, tensor).items()}
                bar.update()
            save_file(tensors, output / file, metadata={"format": "pt"})
            placed |= {hf: (file, tensor.nbytes) for hf, tensor in tensors.items()}
    for stored, count in converted.items():
        if stored != dtype:
            print(f"note: {count} trained tensors were converted from {stored} to the base's {dtype}")
    return placed


def _group_by_bytes(trained: SafetensorsFile, names: list[str], dtype: torch.dtype) -> list[list[str]]:
    """Consecutive names in shards of at most `SHARD_BYTES` (one tensor may exceed it)."""
    parts: list[list[str]] = [[]]
    held = 0
    for name in names:
        size = trained.nbytes(name) // trained.dtype(name).itemsize * dtype.itemsize
        if parts[-1] and held + size > SHARD_BYTES:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    return parts


def _write_index(
    output: Path, source: SafetensorsDir, weight_map: dict[str, str], new: dict[str, tuple[str, int]]
) -> None:
    total = sum(source.nbytes(name) for name in source) + sum(size for _, size in new.values())
    weight_map = weight_map | {name: file for name, (file, _) in new.items()}
    atomic_write_json(output / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_manifest(output: Path, manifest: TrainingManifest, base: Path, known: dict[str, str]) -> None:
    """`upcycle_manifest.json`, last: it holds the hash of every other file; `known` ones are not read again."""
    files = {item.name: known.get(item.name) or file_sha256(item) for item in sorted(output.iterdir())}
    content = {
        "schema": SCHEMA,
        "kind": "upcycle",
        "layout": "hybrid",
        "base": {"path": str(base), "sha256": manifest.base.sha256},
        "layer_pattern": list(manifest.layer_pattern),
        "dsa": {
            "index_topk": manifest.dsa.index_topk,
            "index_n_heads": manifest.dsa.index_n_heads,
            "index_head_dim": manifest.dsa.index_head_dim,
            "q_rank": manifest.q_rank,
        },
        "training": {
            "kind": manifest.kind,
            "iteration": manifest.iteration,
            "consumed_samples": manifest.consumed_samples,
            "consumed_tokens": manifest.consumed_tokens,
        },
        "frozen_sha256": manifest.frozen_sha256,
        "versions": {
            "megatron_patch": megatron_patch.__version__,
            "torch": torch.__version__,
            "safetensors": version("safetensors"),
        },
        "files": files,
    }
    atomic_write_json(output / MANIFEST_FILE, content)
