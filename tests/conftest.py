"""Shared fixtures. The CPU redirect is installed here, before any test can import megatron.core."""

import os
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# Copies of an export's code, which transformers makes to run it, must not land in the user's cache.
if "HF_MODULES_CACHE" not in os.environ:
    os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="hf_modules_")
# Each worker of pytest-xdist has copies of its own: it inherits the variable, and transformers copies without a lock.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["HF_MODULES_CACHE"] = os.path.join(os.environ["HF_MODULES_CACHE"], worker)

import pytest
import torch
from hypothesis import settings

from megatron_patch.devices import cpu_redirect

cpu_redirect.install()
# The same examples in every run, and no time limit for each: a machine that is busy is no fault of the code.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items):
    """Of pytest-xdist's workers, each takes the next file: the longest come first, or the last one is waited for alone."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def device():
    """The activated CPU with megatron-core's groups for one process."""
    from megatron_patch.devices.device import activate, initialize_distributed

    cpu = activate("cpu")
    initialize_distributed(cpu, seed=1)
    return cpu


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory):
    """A tiny random base in fp32 with a tokenizer; read only."""
    from tests.tiny import make_tiny_base, make_tiny_tokenizer

    path = make_tiny_base(tmp_path_factory.mktemp("base") / "tiny")
    make_tiny_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def two_ranks():
    """Two gloo ranks, started at their first use."""
    from tests.distributed import Ranks

    with Ranks(2) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _alone():
    """One thread (small shapes: more only add noise), and none of the state that megatron-core keeps in classes."""
    torch.set_num_threads(1)
    yield
    moe_utils = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if moe_utils is not None:  # the scale of the auxiliary loss, which the schedule of an earlier test set
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
