"""A model and its tokenizer through transformers, whole or not at all. No code of the model's directory runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_patch.errors import UserError
from megatron_patch.io.safetensors_dir import SafetensorsDir
from megatron_patch.pruning.config_json import read_config
from megatron_patch.pruning.families import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": "auto"}
DEVICES = ("cpu", "cuda", "npu", "auto")
OBSERVE_ELSEWHERE = "record expert ids on a rollout engine instead (--from-routed-experts)"


def check_device(device: str | None) -> str:
    """The device to use; None is CUDA where there is a GPU, else the CPU. "auto" spreads a model over all devices.

    Raises:
        UserError: unknown, or not there.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in DEVICES:
        raise UserError(f"--device must be one of {', '.join(DEVICES)}: {device!r}; choose one")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda needs a GPU that torch can use: there is none; use --device cpu")
    if device == "npu" and not (hasattr(torch, "npu") and torch.npu.is_available()):
        raise UserError("--device npu needs torch_npu and a device: there is none; use --device cpu")
    if device == "auto":
        try:
            import accelerate  # noqa: F401 - transformers' device_map is made of it
        except ImportError:
            raise UserError(
                "--device auto spreads the model with accelerate: it is not installed; pip install accelerate"
            ) from None
    return device


def load_model(
    directory: str | Path, *, dtype: str = "auto", device: str = "cpu", otherwise: str = OBSERVE_ELSEWHERE
) -> "PreTrainedModel":
    """The model in evaluation mode; an upcycled export with this package's class.

    Args:
        directory: a Hugging Face directory of a known model_type.
        dtype: "float32", "bfloat16", or "auto", the checkpoint's.
        device: of `check_device`; "auto" is transformers' device_map.
        otherwise: what to do where transformers cannot load the model, for the message.

    Raises:
        UserError: tensors missing or of another shape (an expert would be random, and its statistics with it), or
            something that transformers cannot load.
    """
    model_class = _class(read_config(Path(directory)))
    SafetensorsDir(directory)  # refuses missing and truncated shards
    options: dict[str, Any] = {
        "dtype": DTYPES[dtype],
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # to be listed below, which refuses the model
        "use_safetensors": True,
        "local_files_only": True,
    }
    if device == "auto":
        options["device_map"] = "auto"
    elif device == "cpu":  # sdpa and grouped experts are slow there
        options |= {"attn_implementation": "eager", "experts_implementation": "eager"}
    try:
        with _quiet():
            model, info = model_class.from_pretrained(directory, **options)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"transformers must be able to load the model: {directory}: {str(error)[:300]}; {otherwise}"
        ) from error
    for fault in ("missing_keys", "mismatched_keys"):
        names = sorted(str(item[0] if isinstance(item, tuple) else item) for item in info[fault])
        if names:
            raise UserError(
                f"a model's tensors must be those of its config: {directory} has {len(names)} {fault.replace('_', ' ')} "
                f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}); get it again"
            )
    model = model.eval()
    return model if device == "auto" else model.to(device)


def _class(config: dict) -> type:
    import transformers

    family = family_of(config)
    if config.get("dsa_layers"):  # transformers' own class would leave parts of it random
        from megatron_patch.hf_model.modeling_deepseek_v2_dsa import DeepseekV2DsaForCausalLM

        return DeepseekV2DsaForCausalLM
    found = getattr(transformers, family.model_class, None)
    if found is None:
        raise UserError(
            f"this transformers must know {family.model_type}: {transformers.__version__} does not; install transformers 5.24"
        )
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers would list the MTP layer, which it never loads, tensor by tensor. What is missing is refused anyway."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def load_tokenizer(directory: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer in a model's directory.

    Raises:
        UserError: none there, or one that needs code of its own.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise UserError(f"a tokenizer must be in the model's directory: {directory}: {error}; copy its files") from None
