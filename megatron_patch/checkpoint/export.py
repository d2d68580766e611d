"""A training checkpoint and its base become one Hugging Face directory, all at once or not at all.

The base's tensors are copied byte for byte; the DSA layers' are written anew, and in the native layout what that adds to the
base's layers.
"""

import math
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import megatron_patch
from megatron_patch.checkpoint import export_files
from megatron_patch.checkpoint.base_indexers import open_base_indexers
from megatron_patch.checkpoint.base_shards import Placed, damaged_copy, place_base
from megatron_patch.checkpoint.export_readme import Story, write_readme
from megatron_patch.checkpoint.hf_mapping import HybridMapping, dsa_names, hybrid_mapping, require_same_names, sizes
from megatron_patch.checkpoint.layouts import ARCHITECTURES, NATIVE, layout_config
from megatron_patch.checkpoint.load_base import base_dtype
from megatron_patch.checkpoint.manifest import (
    WEIGHTS_FILE,
    TrainingManifest,
    iteration_directory,
    read_manifest,
    require_base,
    verify_files,
)
from megatron_patch.checkpoint.native_view import NativeView
from megatron_patch.config import BASE_INDEXERS
from megatron_patch.errors import UserError
from megatron_patch.io.finite import all_finite
from megatron_patch.io.hashes import file_sha256, identity_of
from megatron_patch.io.publish import atomic_directory, atomic_write_json, require_empty
from megatron_patch.io.safetensors_dir import INDEX_FILE, SafetensorsDir, SafetensorsFile
from megatron_patch.io.write_safetensors import write_stream
from megatron_patch.model.architecture import Architecture, read_architecture, read_config

SCHEMA = 1
MANIFEST_FILE = "upcycle_manifest.json"
SHARD_BYTES = 4 << 30


def export(
    checkpoint: str | Path,
    base: str | Path,
    output: str | Path,
    *,
    iteration: int | None = None,
    layout: str = "hybrid",
    base_shards: str = "copy",
    base_indexers: str | Path | None = None,
    progress: bool = True,
) -> None:
    """Write the Hugging Face directory of an upcycled model.

    Args:
        checkpoint: a training run's --save directory.
        base: the Hugging Face directory that it was trained on.
        output: a new or empty directory.
        iteration: which checkpoint; None: the latest.
        layout: "hybrid": base layers as they are, DSA layers on top; "native": every layer DSA, for inference engines.
        base_shards: "copy" (on file systems that can, without using space twice) or "symlink" to the base's files.
        base_indexers: --save directory of a run that trained the base's indexers, for the native layout; None: neutral ones.
        progress: show bars over the bytes on stderr.

    Raises:
        UserError: an argument is wrong, the checkpoint is damaged or belongs to another base, or holds other tensors
            than its layer pattern says.
    """
    base, output = Path(base), Path(output)
    _check_arguments(layout, base_shards, base_indexers)
    require_empty(output)
    directory = iteration_directory(checkpoint, iteration)
    for name, source in (("--base", base), ("--checkpoint", Path(checkpoint))):
        if output.resolve().is_relative_to(source.resolve()):
            raise UserError(f"--output must lie outside of {name}: {output} lies in {source}; give another path")
    manifest = read_manifest(directory)
    _check_kind(manifest, checkpoint)
    arch = read_architecture(base)
    export_files.require_tokenizer(base)
    verify_files(directory, manifest, only=(WEIGHTS_FILE,))  # not the optimizer's state, which is larger
    mapping = _check_checkpoint(directory, manifest, arch)
    config = layout_config(layout, read_config(base), arch, manifest.layer_pattern, manifest.dsa, manifest.q_rank)

    source, trained = SafetensorsDir(base), SafetensorsFile(directory / WEIGHTS_FILE)
    dtype, native = base_dtype(source), None
    if layout == NATIVE:
        indexers = None
        if base_indexers is not None:
            indexers = open_base_indexers(base_indexers, manifest.base.sha256, arch, manifest.dsa)
        native = NativeView(source, arch, manifest.layer_pattern, manifest.dsa, indexers)
    with atomic_directory(output) as partial:
        if native is not None:
            placed, new = native.write_base(partial, SHARD_BYTES, progress)
        else:
            placed, new = place_base(source, partial, base_shards, progress), {}
        _require_base(manifest, base, placed)
        of_dsa, hashes = _write_trained(trained, mapping, dtype, partial, progress)
        new |= of_dsa
        _write_index(partial, source, placed.weight_map, new)
        atomic_write_json(partial / "config.json", config)
        export_files.copy_code(partial)
        notes = export_files.copy_texts(base, partial, native=native is not None)
        story = Story(
            name=output.absolute().name,
            base_name=base.absolute().name,
            pattern=manifest.layer_pattern,
            topk=manifest.dsa.index_topk,
            kind=manifest.kind,
            iteration=manifest.iteration,
            native=native,
        )
        write_readme(partial, story)
        _write_manifest(partial, layout, manifest, base, placed.copies | hashes, native)
    for note in [*notes, *(native.notes() if native else [])]:
        print(f"note: {note}")
    print(
        f"exported iteration {manifest.iteration} ({manifest.kind}) to {output}: {len(placed.weight_map) + len(new)} tensors, "
        f"{layout} layout"
    )


def _check_arguments(layout: str, base_shards: str, base_indexers: str | Path | None) -> None:
    if layout not in ARCHITECTURES:
        raise UserError(f"--layout must be {' or '.join(ARCHITECTURES)}: {layout!r}; give one of them")
    if base_shards not in ("copy", "symlink"):
        raise UserError(f"--base-shards must be copy or symlink: {base_shards!r}; give one of them")
    if layout == NATIVE and base_shards == "symlink":
        raise UserError(
            "--base-shards symlink takes the base's files as they are: --layout native renames a tensor of each layer; use "
            "copy"
        )
    if layout != NATIVE and base_indexers is not None:
        raise UserError(
            f"--base-indexers belong to the native layout, in which the base's layers have some: --layout is {layout}; add "
            "--layout native, or leave them out"
        )


def _check_kind(manifest: TrainingManifest, checkpoint: str | Path) -> None:
    if manifest.kind == BASE_INDEXERS:
        raise UserError(
            f"--checkpoint holds trained DSA layers: {checkpoint} holds the base's indexers; give it as --base-indexers, and "
            "the run that trained the DSA layers here"
        )


def _require_base(manifest: TrainingManifest, base: Path, placed: Placed) -> None:
    """The copies are of the base that was trained on. If not, it is another, or the disk lost something.

    Known only now, for the base is read once; the caller removes what it wrote.
    """
    identity = identity_of(placed.base)
    if identity != manifest.base.sha256 and (reason := damaged_copy(base, placed)) is not None:
        raise reason
    require_base(manifest, base, identity)


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


def _write_trained(
    trained: SafetensorsFile, mapping: HybridMapping, dtype: torch.dtype, output: Path, progress: bool
) -> tuple[dict[str, tuple[str, int]], dict[str, str]]:
    """Write the DSA layers under Hugging Face names in the base's dtype; (name -> (file, bytes), file -> SHA-256)."""
    names = sorted(trained.names)
    parts = _group_by_bytes(trained, names, dtype)
    placed: dict[str, tuple[str, int]] = {}
    hashes: dict[str, str] = {}
    with tqdm(total=len(names), unit="tensor", desc="write DSA layers", disable=not progress) as bar:
        for number, part in enumerate(parts, start=1):
            file = f"model-dsa-{number:05d}-of-{len(parts):05d}.safetensors"
            header = [(hf, dtype, shape) for name in part for hf, shape in _shapes(trained, mapping, name).items()]
            hashes[file] = write_stream(output / file, header, _converted(trained, part, mapping, dtype, bar))
            placed |= {hf: (file, math.prod(shape) * dtype.itemsize) for hf, _, shape in header}
    for stored, count in Counter(trained.dtype(name) for name in names).items():
        if stored != dtype:
            print(f"note: {count} trained tensors were converted from {stored} to the base's {dtype}")
    return placed, hashes


def _shapes(trained: SafetensorsFile, mapping: HybridMapping, name: str) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of the tensors that a trained one becomes."""
    empty = torch.empty(trained.shape(name), device="meta")
    return {hf: tuple(view.shape) for hf, view in mapping.to_hf(name, empty).items()}


def _converted(
    trained: SafetensorsFile, names: list[str], mapping: HybridMapping, dtype: torch.dtype, bar: tqdm
) -> Iterator[Tensor]:
    """The trained tensors' parts, one in memory at a time."""
    for name in names:
        tensor = trained.load(name)
        if not all_finite(tensor):
            raise UserError(f"trained weights must be finite: {name} in {trained.path} is not; use an older iteration")
        for view in mapping.to_hf(name, tensor).values():
            yield view.to(dtype)
        bar.update()


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


def _write_manifest(
    output: Path, layout: str, manifest: TrainingManifest, base: Path, known: dict[str, str], native: NativeView | None
) -> None:
    """`upcycle_manifest.json`, last: it holds the hash of every other file; `known` ones are not read again."""
    files = {item.name: known.get(item.name) or file_sha256(item) for item in sorted(output.iterdir())}
    content = {
        "schema": SCHEMA,
        "kind": "upcycle",
        "layout": layout,
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
        **({} if native is None else {"native": native.record()}),
        "versions": {
            "megatron_patch": megatron_patch.__version__,
            "torch": torch.__version__,
            "safetensors": version("safetensors"),
        },
        "files": files,
    }
    atomic_write_json(output / MANIFEST_FILE, content)
