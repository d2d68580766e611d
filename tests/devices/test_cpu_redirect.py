"""What the redirect changes, and what it must leave alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_patch.devices import cpu_redirect
from megatron_patch.devices.device import activate
from megatron_patch.errors import UserError

ROOT = Path(__file__).parents[2]


def test_literal_cuda_lands_on_the_cpu():
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.empty(2, device=torch.device("cuda", 0)).to("cuda").cuda().device.type == "cpu"
    assert torch.nn.Linear(1, 1).cuda().weight.device.type == "cpu"


def test_nothing_claims_that_there_is_a_gpu():
    assert not torch.cuda.is_available()
    assert torch.zeros(2).type() == "torch.FloatTensor"  # only megatron-core's optimizer sees the CUDA name


def test_the_device_context_still_works():
    """It recognises factories by identity; transformers builds models on "meta" through it."""
    with torch.device("meta"):
        assert torch.empty(2).device.type == torch.zeros(2).device.type == torch.arange(3).device.type == "meta"


def test_average_on_gloo(device):
    tensor = torch.tensor([3.0])
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    assert tensor.item() == 3.0
    with pytest.raises(RuntimeError, match="asynchronous"):
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True)


def test_too_late_is_an_error():
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport types\n"
        "sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "from megatron_patch.devices import cpu_redirect\ncpu_redirect.install()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "must be installed before megatron.core is imported" in result.stderr


def test_install_twice_changes_nothing():
    before = torch.empty
    cpu_redirect.install()
    assert torch.empty is before


@pytest.mark.parametrize(("name", "message"), [("cuda", "torch.cuda.is_available"), ("npu", "torch_npu")])
def test_absent_devices_are_refused(name, message):
    with pytest.raises(UserError, match=message):
        activate(name)
