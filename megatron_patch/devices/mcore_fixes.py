"""Faults of megatron-core 0.16.1 that stop this model without Transformer Engine, each mended in one function.

All are guarded by the exact version. Each has a test in `tests/devices/test_mcore_fixes.py` that fails when upstream
mends the fault, so that the mend here can be removed.
"""

import importlib
import importlib.util
from importlib.metadata import PackageNotFoundError, version

import torch

from megatron_patch.errors import UserError

MCORE_VERSION = "0.16.1"


def check_version() -> None:
    """Raises UserError: another megatron-core than the one these fixes were read against."""
    try:
        found = version("megatron-core")
    except PackageNotFoundError:
        found = "none"
    if found != MCORE_VERSION:
        raise UserError(
            f"megatron-core must be {MCORE_VERSION}: found {found}; run pip install megatron-core=={MCORE_VERSION}"
        )


def have_transformer_engine() -> bool:
    """Whether Transformer Engine is installed. megatron-core's own flags say yes without it: they import mocks."""
    try:
        return importlib.util.find_spec("transformer_engine") is not None
    except ValueError:  # a module without a spec: the dummy that MindSpeed puts in its place
        return False


def apply(on_cpu: bool) -> None:
    """Apply what this machine needs: the Transformer Engine mends where it is absent, the CPU mends on the CPU."""
    check_version()
    if not have_transformer_engine():
        name_absent_te_linear()
        name_absent_te_gemm()
    if on_cpu:
        convert_splits_on_cpu()
        redirect_rng_state()


class _NoTransformerEngineLinear:
    """Stands for `TELinear` where Transformer Engine is absent; nothing is an instance of it."""


def name_absent_te_linear() -> None:
    """`isinstance(layer, TELinear)` raises where TELinear is a MagicMock (multi_latent_attention.py:185,
    attention.py:365): give it a class, and say that there is no Transformer Engine."""
    for name in ("transformer.multi_latent_attention", "transformer.attention"):
        module = importlib.import_module(f"megatron.core.{name}")
        module.TELinear = _NoTransformerEngineLinear
        module.HAVE_TE = False


def name_absent_te_gemm() -> None:
    """`te_general_gemm` is never bound when its import fails (moe_utils.py:34), and read at 1192: NameError."""
    importlib.import_module("megatron.core.transformer.moe.moe_utils").te_general_gemm = None


def register_duplicated_linear(cls: type) -> None:
    """Make MLA pass `parallel_mode="duplicated"` to `cls`: it recognises a duplicated projection by identity with
    `TELinear` (multi_latent_attention.py:408, 453), and refuses every other class but ColumnParallelLinear, which
    loses part of the rope key's gradient under tensor parallelism."""
    importlib.import_module("megatron.core.transformer.multi_latent_attention").TELinear = cls


def convert_splits_on_cpu() -> None:
    """`maybe_move_tensor_to_cpu(as_numpy=True)` converts CUDA tensors only (moe_utils.py:1078), so that on the CPU
    the all-to-all receives tensors as split sizes."""

    def convert(tensor, as_numpy: bool = False, record_stream: bool = False):
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    for name in ("moe_utils", "token_dispatcher"):
        importlib.import_module(f"megatron.core.transformer.moe.{name}").maybe_move_tensor_to_cpu = convert


def redirect_rng_state() -> None:
    """tensor_parallel/random.py reads and writes the CUDA generator by its own functions: use the CPU's."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")

    def get_state(device="cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device=-1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    random._get_cuda_rng_state, random._set_cuda_rng_state = get_state, set_state
