"""Models and tokenizers for scoring, through transformers; strict about names, code, softmax scale and tokenizer."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_patch.checkpoint.export_files import ARCHITECTURE, CODE_DIRECTORY, CODE_FILES
from megatron_patch.checkpoint.load_base import IGNORED_HF_NAMES
from megatron_patch.data.tokenizer import load_tokenizer, tokenizer_sha256
from megatron_patch.errors import UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.safetensors_dir import SafetensorsDir
from megatron_patch.model.architecture import BASE_LAYERS, Architecture, is_native, read_architecture, read_config
from megatron_patch.pruning.config_json import whole
from megatron_patch.pruning.families import family_of
from megatron_patch.pruning.load import load_model as load_any_family

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FIRST_RIGHT_TRANSFORMERS = "5.16"
V2_LITE_TYPE = "deepseek_v2"
NO_LIMIT = 1 << 30  # tokens, where config.json sets no limit
SERVE_IT = "serve it and give --endpoint URL for the model, --base-endpoint URL for the base"


@dataclass(frozen=True)
class ModelDirectory:
    """What a model directory holds, found without loading it.

    Attributes:
        vocab_size, max_positions: rows of its embedding, and most tokens of a row.
        arch: what this package knows of a DeepSeek-V2-Lite; None of another family, which pruning alone loads.
        dsa_layers: numbers of the DSA layers that upcycling added; empty for a base or a pruned model.
        index_topk: keys that a query of those attends to; None without DSA layers.
        native: the base's layers below them are DSA too.
        own_code: load with the code in the directory rather than with this package's (which is not the same).
    """

    path: Path
    vocab_size: int
    max_positions: int
    arch: Architecture | None = None
    dsa_layers: tuple[int, ...] = ()
    index_topk: int | None = None
    own_code: bool = False
    native: bool = False


def inspect_directory(
    path: str | Path, *, trust_remote_code: bool = False, any_family: bool = False, weights: bool = True
) -> ModelDirectory:
    """Check config, weights' headers and code of a model directory; loads no weight and runs no code of it.

    Args:
        path: a base, a pruned model or an export.
        trust_remote_code: accept an export whose code is not this package's, to be run when the model is loaded.
        any_family: accept every family that pruning knows, not DeepSeek-V2-Lite alone.
        weights: there must be some. Off: a served model's config and tokenizer.

    Raises:
        UserError: no such model, damaged weights, or foreign code that is not trusted.
    """
    path = Path(path)
    config = read_config(path)
    native = is_native(config)
    if any_family and config.get("model_type") != V2_LITE_TYPE and not native:
        family_of(config)  # refuses what pruning does not know
        arch = None
    else:
        arch = read_architecture(path, export=True)
    if weights:
        SafetensorsDir(path)  # refuses missing and truncated shards
    if arch is None:
        positions = whole(config, "max_position_embeddings", least=1, default=NO_LIMIT)
        return ModelDirectory(path, whole(config, "vocab_size", least=1), positions)
    if not native and config["architectures"] != [ARCHITECTURE]:
        if config.get("dsa_layers"):
            raise UserError(
                f"a model with dsa_layers must be a {ARCHITECTURE}: {path} says {config['architectures']}, with which "
                "its DSA layers would get random weights; export it again"
            )
        return ModelDirectory(path, arch.vocab_size, arch.max_positions, arch)
    layers, topk = config.get("dsa_layers"), config.get("dsa_index_topk")
    if native:
        layers, topk = list(range(config[BASE_LAYERS], arch.num_layers)), config.get("index_topk")
    numbers = set(range(arch.num_layers))
    if not isinstance(layers, list) or not layers or not all(isinstance(i, int) and i in numbers for i in layers):
        raise UserError(
            f"dsa_layers must list layers from 0 to {arch.num_layers - 1}: {path} has {layers!r}; export it again"
        )
    if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
        raise UserError(f"dsa_index_topk must be a whole number above 0: {path} has {topk!r}; export it again")
    differing = [name for name in CODE_FILES if not _same_code(path / name, CODE_DIRECTORY / name)]
    if differing and not trust_remote_code:
        raise UserError(
            f"an export's code must be this release's: {', '.join(differing)} in {path} is missing or another; export "
            "it again, or pass --trust-remote-code to run the code in the directory"
        )
    return ModelDirectory(
        path,
        arch.vocab_size,
        arch.max_positions,
        arch,
        tuple(sorted(layers)),
        topk,
        own_code=bool(differing),
        native=native,
    )


def _same_code(file: Path, ours: Path) -> bool:
    return file.is_file() and file_sha256(file) == file_sha256(ours)


def load_model(
    directory: ModelDirectory, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> "PreTrainedModel":
    """The model in evaluation mode: transformers' stock class for a base, this package's for an export.

    Raises:
        UserError: weights missing, left over or of another shape; or a transformers that gets YaRN's softmax scale
            wrong (before 5.16), with which a base would score too low.
    """
    if directory.arch is None:
        name = str(dtype).removeprefix("torch.")
        return load_any_family(directory.path, dtype=name, device=str(device), otherwise=SERVE_IT)
    options: dict[str, Any] = {
        "dtype": dtype,
        **implementations(directory, device),
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # to be listed with the other faults below, which refuse the model
        "use_safetensors": True,
        "local_files_only": True,
    }
    model, info = _from_pretrained(directory, options)
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        # A mismatched key comes with its two shapes.
        found = (str(item[0] if isinstance(item, tuple) else item) for item in info[fault])
        names = sorted(name for name in found if not IGNORED_HF_NAMES.fullmatch(name))
        if names:
            raise UserError(
                f"a model's tensors must be exactly those of its config: {directory.path} has {len(names)} "
                f"{fault.replace('_', ' ')} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}); get it again"
            )
    for number, layer in enumerate(model.base_model.layers):
        scale, right = layer.self_attn.scaling, directory.arch.softmax_scale
        if not math.isclose(scale, right, rel_tol=1e-6):
            raise UserError(
                f"the softmax scale must include YaRN's factor: layer {number} of {directory.path} has {scale:.6f}, "
                f"{right:.6f} is right; use transformers {FIRST_RIGHT_TRANSFORMERS} or later"
            )
        if number in directory.dsa_layers and not hasattr(layer.self_attn, "index_selector"):
            raise UserError(  # only foreign code can lack it; scrambling would then change nothing, in silence
                f"DSA attention must let its selection be replaced: {type(layer.self_attn).__name__} of {directory.path} "
                "has no index_selector; export it again"
            )
    return model.eval().to(device)


def implementations(directory: ModelDirectory, device: torch.device | str) -> dict[str, str]:
    """How transformers shall compute attention and experts on a device; it decides the last digits of a score."""
    if torch.device(device).type == "cpu":
        # sdpa is slow there with a mask and with MLA's value size, grouped experts are in fp32: 1.5 times as fast.
        return {"attn_implementation": "eager", "experts_implementation": "eager"}
    return {} if directory.arch is None else {"attn_implementation": "sdpa"}


def _from_pretrained(directory: ModelDirectory, options: dict[str, Any]) -> tuple["PreTrainedModel", dict[str, Any]]:
    if directory.own_code:
        # Not AutoModelForCausalLM: it would take a class registered earlier in the process for the same configuration.
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(_model_reference(directory.path), directory.path).from_pretrained(
            directory.path, **options
        )
    if not directory.dsa_layers:
        # Named, not found through auto_map: a published base brings old code of its own, which never runs.
        from transformers import DeepseekV2ForCausalLM

        return DeepseekV2ForCausalLM.from_pretrained(directory.path, **options)
    from megatron_patch.hf_model.modeling_deepseek_v2_dsa import DeepseekV2DsaForCausalLM, DeepseekV32ForCausalLM

    model_class = DeepseekV32ForCausalLM if directory.native else DeepseekV2DsaForCausalLM
    return model_class.from_pretrained(directory.path, **options)


def _model_reference(path: Path) -> str:
    """What auto_map names for a causal language model, `file.Class`; not in another repository."""
    auto_map = read_config(path).get("auto_map")
    reference = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, dict) else None
    if not isinstance(reference, str) or reference.count(".") != 1 or "--" in reference:
        raise UserError(
            f"auto_map must name AutoModelForCausalLM as file.Class: {path} has {reference!r}; export it again"
        )
    return reference


def load_common_tokenizer(
    base: str | Path, model: str | Path, *, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """The tokenizer of both directories.

    Raises:
        UserError: they differ in ids, BOS, EOS or chat template, so that scores would not compare.
    """
    ours, theirs = (load_tokenizer(path, trust_remote_code=trust_remote_code) for path in (base, model))
    for what, first, second in (
        ("tokenizers", tokenizer_sha256(ours), tokenizer_sha256(theirs)),
        ("chat templates", ours.chat_template, theirs.chat_template),
    ):
        if first != second:
            raise UserError(
                f"base and model must have the same {what}: {base} and {model} differ; copy the base's files"
            )
    return ours
