"""Activation on Ascend, with stand-ins for torch_npu and MindSpeed that record what is asked of them.

In fresh processes, of `forked`: activation comes before the first import of megatron-core. That real MindSpeed behaves as the stand-in is
read from its public sources, not tried.
"""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron_patch.devices import npu
from megatron_patch.devices.device import Device

from .forked import Forks

HERE = Path(__file__).parent
TORCH_NPU, MINDSPEED = HERE / "stand_ins", HERE / "stand_ins_mindspeed"
FLAGS = ["--base-model", "b", "--recompute-num-layers", "1", "--tokenizer-type", "PretrainedFromHF", "--npu-deterministic", "--bf16"]

ACTIVATE = """
import sys
from megatron_patch import errors
from megatron_patch.devices import device as devices
errors.OTHERS_SPEAK_FIRST = 0
def main():
    global device
    device = devices.activate("npu")
code = errors.run(main)
if code:
    sys.exit(code)
"""
# Everything that needs a real device is replaced by a note of the call.
INITIALIZE = """
import torch, torch.distributed as dist
from torch_npu import record
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
dist.init_process_group = lambda backend, **_: record.note("process group " + backend)
parallel_state.initialize_model_parallel = lambda **sizes: record.note(f"parallel {sizes['expert_model_parallel_size']}")
parallel_state.get_expert_model_parallel_world_size = lambda: 8
random.model_parallel_cuda_manual_seed = lambda seed: record.note(f"seed {seed}")
devices.initialize_distributed(device, 7, expert_parallel=8)
print("\\n".join(record.EVENTS))
from megatron.core.transformer import attention
print("mended again", attention.HAVE_TE is False)
"""
CONFIG = """
from dataclasses import fields
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron_patch.model.architecture import read_architecture
from megatron_patch.model.builder import BuildSettings, megatron_config
from megatron_patch.model.layer_pattern import appended_pattern
arch = read_architecture("tests/data/deepseek_v2_lite_config.json")
config = megatron_config(arch, appended_pattern(27, 2), BuildSettings())
known = {each.name for each in fields(MLATransformerConfig)}
from megatron_patch.devices.mcore_fixes import have_transformer_engine
sys.modules["transformer_engine"] = type(sys)("transformer_engine")  # MindSpeed's dummy has no spec: importlib raises
assert not have_transformer_engine()
print("leaked", sorted(set(vars(config)) - known), repr(config.recompute_num_layers))
"""


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """`run(code, *argv, path=..., **variables)` in a process of its own."""
    forks = Forks()
    yield lambda code, *argv, path=(TORCH_NPU, MINDSPEED), **variables: forks.run(code, argv, path, variables)
    forks.close()


@pytest.mark.parametrize("mode", ["", "namespace"])
def test_everything_happens_once_and_in_order(run: Run, mode: str) -> None:
    """Whether `repatch` takes a dictionary, or what has attributes."""
    done = run(ACTIVATE + "devices.activate('npu')\n" + INITIALIZE, *FLAGS, LOCAL_RANK="1", STAND_IN=mode)
    assert done.returncode == 0, done.stderr
    events = [line for line in done.stdout.splitlines() if not line.startswith("set_device")]
    typed = (
        "context_parallel_size=int:1 expert_model_parallel_size=int:8 expert_tensor_parallel_size=int:1 "
        "gradient_accumulation_fusion=bool:False moe_grouped_gemm=bool:False moe_token_dispatcher_type=str:alltoall "
        "multi_latent_attention=bool:False pipeline_model_parallel_size=int:1 tensor_model_parallel_size=int:1 use_flash_attn=bool:False"
    )
    assert events == [
        "torch_npu",
        "transfer_to_npu",
        "adaptor argv=1 core_before=False",
        "process group cpu:gloo,npu:hccl",
        f"repatch argv=1 {typed}",
        "parallel 8",
        "seed 7",
        "mended again True",
    ]
    assert "set_device 1" in done.stdout


def test_our_flags_do_not_reach_transformer_config(run: Run) -> None:
    """Typed as text, one of them would be a wrong setting of megatron-core."""
    done = run(ACTIVATE + "assert len(sys.argv) == 9, sys.argv\n" + CONFIG, *FLAGS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "leaked [] None"


def test_without_the_cut_they_would(run: Run) -> None:
    """What the stand-in does, and the real adaptor: else the test above could not fail."""
    done = run(ACTIVATE.replace("def main", "npu = devices.npu\nnpu._visible_argv = npu.contextlib.nullcontext\ndef main") + CONFIG, *FLAGS)
    assert done.returncode == 0, done.stderr
    assert "'base_model'" in done.stdout and done.stdout.strip().endswith("'1'")


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_nothing_of_it_is_imported_elsewhere(run: Run, name: str) -> None:
    code = f"""
import sys
from megatron_patch.devices.device import activate
from megatron_patch.ops.backends import choose_backend
try:
    activate({name!r})
    import megatron_patch.model.builder
except ValueError as error:
    print(error)
choose_backend("auto", {name!r})
print([each for each in sys.modules if each.split(".")[0] in ("torch_npu", "mindspeed")])
"""
    done = run(code)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_the_default_is_the_npu_where_there_is_one(run: Run) -> None:
    code = "from megatron_patch.devices.device import default_name\nprint(default_name())"
    assert run(code).stdout.strip() == "npu"
    assert run("import torch\ntorch.cuda.is_available = lambda: True\n" + code).stdout.strip() == "npu", "what transfer_to_npu makes of it"
    assert run(code, STAND_IN="no_npu").stdout.strip() == "cpu"
    assert run(code, path=()).stdout.strip() == "cpu"
    broken = run("from megatron_patch import errors\nimport sys\n" + code.replace("print(default_name())", "sys.exit(errors.run(default_name))"), STAND_IN="breaks")
    assert broken.returncode == 2 and "does not load" in broken.stderr, "a fall-back in silence"


@pytest.mark.parametrize(
    "variables, path, words",
    [
        ({}, (), "needs torch_npu: it is not installed"),
        ({}, (TORCH_NPU,), "needs MindSpeed, which does not load (No module named 'mindspeed'); install MindSpeed's branch core_r0.16.0"),
        ({"STAND_IN": "no_npu"}, (TORCH_NPU, MINDSPEED), "torch.npu.is_available() is False; source CANN's set_env.sh"),
        (
            {"STAND_IN": "breaks"},
            (TORCH_NPU, MINDSPEED),
            "torch_npu is installed and does not load (ImportError: libhccl.so: cannot open shared object file: No such file or directory); "
            "source CANN's set_env.sh, install the release that fits torch, or give --device cpu",
        ),
        ({"LOCAL_RANK": "2"}, (TORCH_NPU, MINDSPEED), "rank 2 of this machine has none of 2"),
        (
            {"STAND_IN": "needs_training"},
            (TORCH_NPU, MINDSPEED),
            "needs megatron.training, which megatron-core's wheel does not have (import: No module named 'megatron.training'); "
            "clone Megatron-LM's branch core_r0.16.0 and put it on PYTHONPATH",
        ),
        ({"STAND_IN": "needs_package"}, (TORCH_NPU, MINDSPEED), "MindSpeed needs the package a_package_that_nobody_has"),
    ],
)
def test_what_is_missing_is_one_line_with_its_remedy(run: Run, variables: dict, path: tuple, words: str) -> None:
    done = run(ACTIVATE, path=path, **variables)
    assert done.returncode == 2, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ") and words in line, line


def test_another_repatch_is_named(run: Run) -> None:
    code = ACTIVATE + "from megatron_patch.devices import npu\nsys.exit(errors.run(lambda: npu.repatch(expert_parallel=1)))"
    done = run(code, STAND_IN="old_repatch")
    assert done.returncode == 2
    assert "must be that of branch core_r0.16.0: its repatch failed with TypeError" in done.stderr


def test_sums_in_fp64_lie_where_they_can_be_added_up() -> None:
    """HCCL adds up none: they go through gloo."""
    assert Device("npu", torch.device("meta"), npu.BACKEND).sums_device.type == "cpu" and "cpu:gloo" in npu.BACKEND
    assert Device("cuda", torch.device("meta"), "nccl").sums_device.type == "meta"


def test_megatron_core_must_come_after(run: Run) -> None:
    done = run("import megatron.core\n" + ACTIVATE)
    assert "MindSpeed's adaptor must be imported before megatron.core" in done.stderr
