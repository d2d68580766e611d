"""Ascend: MindSpeed put under megatron-core, the right way round.

    torch -> torch_npu -> mindspeed.megatron_adaptor -> megatron.core -> our modules -> repatch(typed) -> parallel groups

Importing the adaptor patches torch and megatron-core. While it does so it parses **sys.argv** and takes every flag that it
does not know, as text, into each TransformerConfig (`--recompute-num-layers 1` becomes the string "1"); a few flags of that
kind even make it patch `megatron.training`, which megatron-core's wheel does not have. So it sees a command line without
flags, and what it must know comes afterwards, typed, through `repatch`.

MindSpeed's own DSA switches patch all layers at once and are left alone: our layers bring their specs, and call torch_npu's
operators themselves (ops/npu.py). Its `multi_latent_attention` switch replaces MLA's constructor and takes
max_position_embeddings for YaRN's original length; it stays off, too.

Written from MindSpeed's public sources (branch core_r0.16.0). **Not run on a device.** The tests run it against stand-ins that
record what is asked of them.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator

import torch

from megatron_patch.errors import UserError

# gloo carries what lives on the CPU: objects, and sums in fp64, which HCCL does not add up.
BACKEND = "cpu:gloo,npu:hccl"
MINDSPEED_BRANCH = "core_r0.16.0"
ADAPTOR = "mindspeed.megatron_adaptor"
# What the adaptor may see of the command line. Everything else would reach TransformerConfig as text.
VISIBLE_FLAGS: tuple[str, ...] = ()
_INSTALL = (
    f"install MindSpeed's branch {MINDSPEED_BRANCH} from source (pip install -e MindSpeed; it is not on PyPI), see docs/ascend.md"
)
_adaptor_active = False


def is_installed() -> bool:
    """Whether torch_npu is there. It is looked for, not imported: elsewhere nothing of it may load."""
    return importlib.util.find_spec("torch_npu") is not None


def is_available() -> bool:
    """Whether torch can use an NPU; imports torch_npu where it is installed.

    Raises:
        UserError: it is installed and does not load. The CPU in its place would be a silent fall-back.
    """
    if not is_installed():
        return False
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # a missing library of CANN, another torch, a driver: each has an exception of its own
        raise UserError(
            f"torch_npu is installed and does not load ({type(error).__name__}: {error}); source CANN's set_env.sh, "
            "install the release that fits torch, or give --device cpu"
        ) from error
    return torch.npu.is_available()


def activate(local_rank: int) -> torch.device:
    """Load torch_npu and MindSpeed's adaptor, and take this rank's device.

    Raises:
        UserError: torch_npu or MindSpeed is missing or does not load, or there is no such device.
        RuntimeError: megatron.core was imported before.
    """
    global _adaptor_active
    if not is_installed():
        raise UserError("--device npu needs torch_npu: it is not installed; install the release that fits torch, see docs/ascend.md")
    if not is_available():
        raise UserError(
            "--device npu needs an NPU that torch can use: torch.npu.is_available() is False; source CANN's set_env.sh and look at npu-smi info"
        )
    if (count := torch.npu.device_count()) <= local_rank:
        raise UserError(f"each rank needs a device: rank {local_rank} of this machine has none of {count}; lower --nproc-per-node")
    torch.npu.set_device(local_rank)
    if not _adaptor_active:
        if any(name == "megatron.core" or name.startswith("megatron.core.") for name in sys.modules):
            raise RuntimeError("MindSpeed's adaptor must be imported before megatron.core")
        _import_adaptor()
        _adaptor_active = True
    return torch.device("npu", local_rank)


def typed_settings(*, expert_parallel: int) -> dict[str, bool | int | str]:
    """What MindSpeed has to know of our model, by Megatron's names.

    Args:
        expert_parallel: ranks over which the experts of a layer are spread.
    """
    return {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": expert_parallel,
        "expert_tensor_parallel_size": 1,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "use_flash_attn": False,  # our layers bring their core attention
        "multi_latent_attention": False,  # its own would take the YaRN length from the wrong setting
        "gradient_accumulation_fusion": False,  # would write gradients of frozen weights, which have no buffer
    }


def repatch(*, expert_parallel: int) -> None:
    """Tell MindSpeed what it must know; after all of megatron-core is imported, before parallel groups are made.

    Raises:
        UserError: this MindSpeed's `repatch` takes no settings, or needs megatron.training.
    """
    adaptor = importlib.import_module(ADAPTOR)
    with _one_line("repatch"), _visible_argv():  # a later MindSpeed may look at the command line again
        adaptor.repatch(_Settings(typed_settings(expert_parallel=expert_parallel)))


class _Settings(dict):
    """A dictionary whose items are its attributes, too: some commits of MindSpeed read `vars()` of what `repatch` is given."""

    def __init__(self, settings: dict[str, bool | int | str]):
        super().__init__(settings)
        self.__dict__.update(settings)


def _import_adaptor() -> None:
    with _one_line("import"), _visible_argv():
        importlib.import_module(ADAPTOR)


@contextlib.contextmanager
def _visible_argv() -> Iterator[None]:
    """While the block runs, sys.argv holds the program's name and `VISIBLE_FLAGS` alone."""
    before = sys.argv[:]
    sys.argv[:] = [*before[:1], *(word for word in before[1:] if word in VISIBLE_FLAGS)]
    try:
        yield
    finally:
        sys.argv[:] = before


@contextlib.contextmanager
def _one_line(step: str) -> Iterator[None]:
    """MindSpeed's ways to fail here, each with its remedy."""
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        name = getattr(error, "name", None) or ""
        if "megatron.training" in f"{name} {error}":
            raise UserError(
                f"this MindSpeed needs megatron.training, which megatron-core's wheel does not have ({step}: {error}); "
                f"clone Megatron-LM's branch {MINDSPEED_BRANCH} and put it on PYTHONPATH"
            ) from error
        if isinstance(error, ImportError) and name.partition(".")[0] == "mindspeed":
            raise UserError(f"--device npu needs MindSpeed, which does not load ({error}); {_INSTALL}") from error
        if isinstance(error, ImportError) and name:
            raise UserError(f"MindSpeed needs the package {name.partition('.')[0]} ({error}); pip install it") from error
        raise UserError(
            f"MindSpeed's adaptor must be that of branch {MINDSPEED_BRANCH}: its {step} failed with {type(error).__name__}: {error}; {_INSTALL}"
        ) from error
