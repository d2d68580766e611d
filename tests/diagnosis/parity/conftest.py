"""A tiny upcycled model whose trained weights are random, as a checkpoint and as an export, in fp32 and bf16."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.tiny import make_tiny_base, make_tiny_tokenizer

TEXT = "It was a bright cold day in the valley, and the clocks of the old town were striking thirteen. " * 20
TOKENS, DOCUMENTS = 96, 3


@dataclass
class Journey:
    """A save directory, its export, the base, and the text to read."""

    base: Path
    save: Path
    export: Path
    text: Path
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def make_journey(path: Path, dtype: str) -> Journey:
    """Write it all; the DSA layers are the last base layer plus noise, so that every part of them matters."""
    from megatron_patch.checkpoint.export import export
    from megatron_patch.checkpoint.save import Identity, Progress, take_snapshot
    from megatron_patch.checkpoint.saver import Saver
    from megatron_patch.io.hashes import directory_identity
    from tests.model.build import TINY_DSA, tiny_model

    base = make_tiny_base(path / "base", dtype=getattr(torch, dtype))
    make_tiny_tokenizer(base)
    model, _, pattern = tiny_model(base, init="copy", dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    identity = Identity("sft", str(base), directory_identity(base), pattern, TINY_DSA, 64, "f" * 64)
    Saver(keep_last=0).save(take_snapshot(path / "save", model, {}, identity, Progress(iteration=3)), background=False)
    export(path / "save", base, path / "export", progress=False)
    (path / "text.txt").write_text(TEXT)
    return Journey(base, path / "save", path / "export", path / "text.txt", dtype)


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def journey(request, device, tmp_path_factory) -> Journey:
    """In both precisions."""
    return make_journey(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def fp32(device, tmp_path_factory) -> Journey:
    return make_journey(tmp_path_factory.mktemp("only_fp32"), "float32")
