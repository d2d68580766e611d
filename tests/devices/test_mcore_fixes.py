"""Each mend of megatron-core 0.16.1: what happens without it. A test that fails here says that upstream mended it.

The faults are shown in fresh processes, since this one has the mends applied.
"""

import subprocess
from collections.abc import Callable, Iterator

import pytest

from megatron_patch.devices import mcore_fixes
from megatron_patch.errors import UserError
from tests.devices.forked import Forks

PREPARE = """
import sys
from megatron_patch.devices import cpu_redirect, mcore_fixes
cpu_redirect.install()
mends = {{"name_absent_te_linear", "name_absent_te_gemm", "convert_splits_on_cpu", "redirect_rng_state"}} - {{{without!r}}}
for mend in sorted(mends):
    getattr(mcore_fixes, mend)()
from megatron_patch.devices.device import Device, initialize_distributed
import torch
initialize_distributed(Device("cpu", torch.device("cpu"), "gloo"), 1)
from tests.tiny import make_tiny_base
from tests.model.build import tiny_model
from megatron_patch.model.builder import forward_pack
"""
FORWARD = """
model, state, _ = tiny_model(make_tiny_base(sys.argv[1]))
tokens = torch.arange(20)
forward_pack(model.train(), tokens, torch.tensor([0, 20], dtype=torch.int32), tokens).sum().backward()
print("ran")
"""


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture
def run(forks: Forks, tmp_path) -> Run:
    """`run(without=MEND, code=...)` in a process of its own that has all the other mends."""
    return lambda without, code=FORWARD: forks.run(PREPARE.format(without=without) + code, [str(tmp_path)], (), {})


def test_all_mends_together_run(run: Run) -> None:
    result = run(without="nothing")
    assert result.stdout.endswith("ran\n"), result.stderr


def test_without_the_te_linear_isinstance_meets_a_mock(run: Run) -> None:
    # The builder's registration of DuplicatedLinear covers MLA; attention.py's other class stays a mock.
    code = """
import megatron.core.transformer.multi_latent_attention as mla
try:
    isinstance(object(), mla.TELinear)
except TypeError as error:
    print("TypeError", error)
"""
    assert "TypeError isinstance()" in run(without="name_absent_te_linear", code=code).stdout


def test_without_the_te_gemm_the_router_raises_a_name_error(run: Run) -> None:
    assert "te_general_gemm" in run(without="name_absent_te_gemm").stderr


def test_without_the_conversion_split_sizes_stay_tensors(run: Run) -> None:
    code = """
from megatron.core.transformer.moe import token_dispatcher
print(type(token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1]), as_numpy=True)).__name__)
"""
    assert run(without="convert_splits_on_cpu", code=code).stdout.endswith("Tensor\n")
    assert run(without="nothing", code=code).stdout.endswith("ndarray\n")


def test_without_the_rng_redirect_the_tracker_is_ignored_in_silence(run: Run) -> None:
    """Setting the state is queued for a CUDA initialisation that never comes: forked draws follow the plain seed."""
    code = """
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
torch.manual_seed(5)
plain = torch.rand(4)
torch.manual_seed(5)
with get_cuda_rng_tracker().fork():
    print("ignored" if torch.equal(torch.rand(4), plain) else "obeyed")
"""
    assert run(without="redirect_rng_state", code=code).stdout.endswith("ignored\n")
    assert run(without="nothing", code=code).stdout.endswith("obeyed\n")


def test_mla_names_duplicated_linear_by_identity_only(device):
    import megatron.core.transformer.multi_latent_attention as mla

    from megatron_patch.model.layers import DuplicatedLinear

    mcore_fixes.register_duplicated_linear(DuplicatedLinear)
    assert mla.TELinear is DuplicatedLinear


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(mcore_fixes, "version", lambda name: "0.17.0")
    with pytest.raises(UserError, match=r"must be 0\.16\.1: found 0\.17\.0; run pip install megatron-core==0\.16\.1"):
        mcore_fixes.check_version()
