"""One hybrid directory and one loaded model for this room; tests that change the model load their own."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hf_model.hybrid import make_tiny_export
from tests.tiny import make_tiny_base


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory):
    return make_tiny_base(tmp_path_factory.mktemp("hf") / "base")


@pytest.fixture(scope="session")
def export_dir(tmp_path_factory, base_dir):
    return make_tiny_export(tmp_path_factory.mktemp("hf") / "hybrid", base_dir)


@pytest.fixture
def load():
    """A function: directory -> model in evaluation mode, through the auto class and the directory's own code."""

    def from_directory(path, **options):
        options = {"trust_remote_code": True, "dtype": torch.float32, "attn_implementation": "sdpa"} | options
        return AutoModelForCausalLM.from_pretrained(path, **options).eval()

    return from_directory


@pytest.fixture
def model(load, export_dir):
    return load(export_dir)
