"""Weights straight from safetensors into a model: one tensor at a time, in place, strict about names and shapes."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from megatron_patch.checkpoint.hf_mapping import (
    HybridMapping,
    base_indexer_mapping,
    dsa_names,
    hybrid_mapping,
    native_mapping,
    require_same_names,
)
from megatron_patch.errors import UserError
from megatron_patch.io.finite import all_finite
from megatron_patch.io.safetensors_dir import SafetensorsDir, SafetensorsFile
from megatron_patch.model.architecture import Architecture
from megatron_patch.model.names import expert_number, global_parameters

# Old checkpoints store the RoPE frequencies that every reader computes.
IGNORED_HF_NAMES = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
THREADS = 2  # that read: one waits for the disk while the other converts. Each holds a tensor, and loading is to hold few
FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_GET_AGAIN = "the directory is not a whole DeepSeek-V2-Lite-shaped model of its own config.json, get it again"


@dataclass
class LoadReport:
    """What a load did, for the log: nothing is dropped or rounded without a count.

    Attributes:
        tensors: Hugging Face or saved tensors copied into the model.
        parameters: parameters of the model that they filled, wholly.
        ignored: tensors of the directory that no model needs (old RoPE frequencies).
        elsewhere: tensors that belong to other ranks' layers or experts.
        dtypes: ("torch.bfloat16", "torch.float32") -> tensors that were converted so.
    """

    tensors: int = 0
    parameters: int = 0
    ignored: tuple[str, ...] = ()
    elsewhere: int = 0
    dtypes: Counter = field(default_factory=Counter)


def load_base(
    model: nn.Module,
    directory: str | Path,
    arch: Architecture,
    pattern: tuple[str, ...],
    *,
    progress: bool = True,
    layer_offset: int = 0,
    local_experts: range | None = None,
) -> LoadReport:
    """Fill the base part of `model` (all but its DSA layers, and indexers beside base layers) from a Hugging Face directory.

    Everything is checked from the files' headers before the first byte is copied.

    Args:
        model: bare megatron-core model, any parameter dtype; bf16 into fp32 is exact.
        directory: single file or shards, one floating dtype; an export works too, its DSA layers are left aside.
        arch: what `read_architecture(base)` gave; an export's own config counts its DSA layers as layers.
        pattern: of the model, e.g. ("mla",) * 27 + ("dsa",) * 2.
        progress: show a bar over the bytes on stderr.
        layer_offset: global number of the model's layer 0 (pipeline stages).
        local_experts: global numbers of the experts that this model holds; None: all.

    Raises:
        UserError: the directory lacks tensors, has unknown ones, or one of another shape, vocabulary or dtype, or a
            value that is not finite.
        ValueError: the model's own parameters are not those of `arch` and `pattern`.
    """
    source = SafetensorsDir(directory)
    mapping = hybrid_mapping(arch, pattern)
    above = {hf for sources in dsa_names(mapping, arch).values() for hf in sources}
    parameters = global_parameters(model, local_experts, layer_offset)
    trained = set(dsa_names(mapping, arch))
    indexers = base_indexer_mapping(arch).entries  # of a model that has some beside its base layers
    parameters = {name: parameter for name, parameter in parameters.items() if name not in trained | indexers.keys()}
    whole = layer_offset == 0 and local_experts is None
    expected = {name for name in mapping.entries if name not in trained}
    _check_model(parameters, expected, whole)
    ignored = tuple(name for name in source if IGNORED_HF_NAMES.fullmatch(name))
    base_names = {hf for name in expected for hf in mapping.entries[name]}
    require_same_names(str(source.path), base_names, set(source) - set(ignored) - above, _GET_AGAIN)
    _check_vocabulary(source, arch)
    base_dtype(source, base_names)  # here, not when the run is over and `export` refuses
    report = _fill(parameters, mapping, source, label=f"load {source.path.name}", progress=progress)
    report.ignored = ignored
    report.elsewhere = len(base_names) - report.tensors
    return report


def load_trained(
    model: nn.Module, path: str | Path, *, layer_offset: int = 0, local_experts: range | None = None
) -> LoadReport:
    """Fill the trainable parameters of `model` from a training checkpoint's safetensors file, strictly both ways.

    Args:
        model: its parameters with `requires_grad` are filled, the others are not touched.
        path: `model.safetensors` of a checkpoint: megatron-core names, global layer and expert numbers.
        layer_offset, local_experts: as in `load_base`.

    Raises:
        UserError: the file lacks a trainable parameter, holds another, or one of another shape.
    """
    source = SafetensorsFile(path)
    parameters = {
        name: parameter
        for name, parameter in global_parameters(model, local_experts, layer_offset).items()
        if parameter.requires_grad
    }
    found = {name for name in source.names if not _of_other_rank(name, local_experts)}
    if layer_offset:
        found &= set(parameters)
    remedy = "build the model with the layer pattern that the checkpoint was trained with"
    require_same_names(str(source.path), parameters, found, remedy)
    report = _fill(parameters, None, source, label="load trained weights", progress=False)
    report.elsewhere = len(source.names) - report.tensors
    return report


def _of_other_rank(name: str, local_experts: range | None) -> bool:
    """Whether it is the parameter of an expert that another rank holds."""
    number = expert_number(name)
    return local_experts is not None and number is not None and number not in local_experts


def load_trained_from_export(
    model: nn.Module,
    directory: str | Path,
    arch: Architecture,
    pattern: tuple[str, ...],
    *,
    native: bool = False,
    progress: bool = False,
    local_experts: range | None = None,
) -> LoadReport:
    """Fill the DSA layers of `model` from an exported Hugging Face directory; `arch` is the base's.

    Args:
        native: the directory is in the native layout, whose base layers hold more tensors; the DSA layers' are the same.
        local_experts: as in `load_base`.

    Raises:
        UserError: the directory lacks one of their tensors, or has one of another shape.
    """
    source = SafetensorsDir(directory)
    mapping = hybrid_mapping(arch, pattern)
    named = dsa_names(mapping, arch)
    parameters = {name: p for name, p in global_parameters(model, local_experts).items() if name in named}
    here = {name for name in named if not _of_other_rank(name, local_experts)}
    if set(parameters) != here:
        raise ValueError(f"the model has {len(parameters)} of its {len(here)} DSA parameters")
    expected = set((native_mapping(arch, len(pattern)) if native else mapping).hf_names)
    found = {name for name in source if not IGNORED_HF_NAMES.fullmatch(name)}
    require_same_names(str(source.path), expected, found, "give an export with the same layer pattern")
    return _fill(parameters, mapping, source, label=f"load {source.path.name}", progress=progress)


def _check_model(parameters: Mapping[str, nn.Parameter], expected: set[str], whole: bool) -> None:
    """A model of other names is a defect of its builder, not of the user's input."""
    unknown, missing = sorted(set(parameters) - expected), sorted(expected - set(parameters))
    if unknown or (whole and missing):
        raise ValueError(
            f"the model's base parameters differ from its pattern's: {len(unknown)} unknown {unknown[:3]}, "
            f"{len(missing)} missing {missing[:3]}"
        )


def _check_vocabulary(source: SafetensorsDir, arch: Architecture) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = source.shape(name)[:1]
        if rows != (arch.vocab_size,):
            raise UserError(
                f"{name} must have vocab_size rows: {source.path} has {rows[0] if rows else 'none'}, its config.json says "
                f"{arch.vocab_size}; a padded vocabulary is not supported, remove the padding rows or correct config.json"
            )


def base_dtype(source: SafetensorsDir, names: Iterable[str] | None = None) -> torch.dtype:
    """The dtype of the base's weights; `names` leaves out an export's DSA layers.

    Raises:
        UserError: they have several, or one that is no plain floating point (quantised weights need their scales).
    """
    names = (name for name in source if not IGNORED_HF_NAMES.fullmatch(name)) if names is None else names
    example = {source.dtype(name): name for name in names}
    foreign = [dtype for dtype in example if dtype not in FLOATING]
    if foreign:
        raise UserError(
            f"weights must be bf16, fp16 or fp32: {example[foreign[0]]} in {source.path} is {foreign[0]}; quantised "
            "weights are not read, get the bf16 model"
        )
    if len(example) != 1:
        shown = ", ".join(f"{dtype} ({name})" for dtype, name in sorted(example.items(), key=str))
        raise UserError(f"the base must have one dtype: {source.path} has {shown}; convert it to one")
    return next(iter(example))


@torch.no_grad()
def _fill(
    parameters: Mapping[str, nn.Parameter],
    mapping: HybridMapping | None,
    source: SafetensorsDir | SafetensorsFile,
    *,
    label: str,
    progress: bool,
) -> LoadReport:
    """Copy into views of the parameters, in the order of the file, after checking every shape.

    `mapping` None: the file has the parameters' own names.
    """
    targets: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        views = {name: parameter.data} if mapping is None else mapping.to_hf(name, parameter.data)
        for key, view in views.items():
            if source.shape(key) != tuple(view.shape):
                raise UserError(
                    f"shapes must agree: {key} in {source.path} is {source.shape(key)}, the model's {name} wants "
                    f"{tuple(view.shape)}; the weights and the settings describe different models"
                )
        targets |= views
    report = LoadReport(parameters=len(parameters))
    total = sum(source.nbytes(key) for key in targets)
    wanted = [key for key in source.names if key in targets]
    if len(wanted) < len(targets):
        missing = sorted(set(targets) - set(wanted))
        raise AssertionError(f"{len(missing)} parameters have no tensor, the first is {missing[0]}")
    pool = ThreadPoolExecutor(THREADS)
    try:
        with tqdm(total=total, unit="B", unit_scale=True, desc=label, disable=not progress) as bar:
            for key, dtype in zip(wanted, pool.map(lambda key: _copy(source, key, targets[key]), wanted), strict=True):
                if dtype != targets[key].dtype:
                    report.dtypes[str(dtype), str(targets[key].dtype)] += 1
                report.tensors += 1
                bar.update(source.nbytes(key))
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, or Ctrl-C
    return report


@torch.no_grad()  # autograd's mode is each thread's own
def _copy(source: SafetensorsDir | SafetensorsFile, key: str, view: Tensor) -> torch.dtype:
    """Read a tensor into `view`, rounded to its dtype; returns the file's."""
    tensor = source.load(key)
    if not all_finite(tensor):
        raise UserError(
            f"weights must be finite: {key} in {source.path} holds {int((~tensor.isfinite()).sum())} values that "
            "are not; get the file again, or use an older checkpoint"
        )
    view.copy_(tensor)
    return tensor.dtype
