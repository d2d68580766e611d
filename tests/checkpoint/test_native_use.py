"""Native exports in the hands of the other commands: trained on, scored, tokenised, and refused where they do not belong."""

import json
import os
import subprocess
import sys

import pytest
import torch

from megatron_patch.checkpoint.export import export
from megatron_patch.checkpoint.from_export import load_export_weights
from megatron_patch.checkpoint.save import Identity, Progress, take_snapshot
from megatron_patch.checkpoint.saver import Saver
from megatron_patch.evaluation.ablations import bypassed, dsa_layers, scrambled
from megatron_patch.evaluation.loading import inspect_directory, load_model
from megatron_patch.io.hashes import directory_identity
from megatron_patch.model.architecture import read_architecture
from tests.checkpoint.runs import write_run
from tests.hf_model.hybrid import tokens
from tests.hf_model.other_environment import verl_python
from tests.model.build import TINY_DSA, tiny_model
from tests.tiny import make_tiny_base, make_tiny_tokenizer

LAYOUTS = ("hybrid", "native")


@pytest.fixture(scope="module")
def journey(device, base, tmp_path_factory):
    """(folder with an export of each layout, identity) of a model whose every trained value is random."""
    path = tmp_path_factory.mktemp("journey")
    model, _, pattern = tiny_model(base, init="copy")
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    identity = Identity("sft", str(base), directory_identity(base), pattern, TINY_DSA, 64, "f" * 64)
    Saver(keep_last=0).save(take_snapshot(path / "save", model, {}, identity, Progress(iteration=30)), background=False)
    for layout in LAYOUTS:
        export(path / "save", base, path / layout, layout=layout, progress=False)
    return path, identity


@pytest.mark.parametrize("start", LAYOUTS)
def test_export_loaded_and_exported_again_is_bit_equal(journey, base, tmp_path, start):
    """Every file of both layouts, the manifest included, whichever of them the DSA layers were read from."""
    first, identity = journey
    model, _, _ = tiny_model(base, init="random")
    load_export_weights(first / start, model, identity, read_architecture(base))
    Saver(keep_last=0).save(take_snapshot(tmp_path / "save", model, {}, identity, Progress(iteration=30)), background=False)
    for layout in LAYOUTS:
        export(tmp_path / "save", base, tmp_path / layout, layout=layout, progress=False)
        files = sorted(item.name for item in (first / layout).iterdir())
        assert files == sorted(item.name for item in (tmp_path / layout).iterdir())
        for name in files:
            assert (first / layout / name).read_bytes() == (tmp_path / layout / name).read_bytes(), name


@torch.no_grad()
def test_evaluation_ablates_the_added_layers_alone(journey, base):
    """Bypassed, a native model is its base, below top-k and up to the eps."""
    directory = inspect_directory(journey[0] / "native")
    assert directory.native and directory.dsa_layers == (3, 4) and directory.index_topk == TINY_DSA.index_topk
    model, stock = load_model(directory), load_model(inspect_directory(base))
    assert dsa_layers(model) == (3, 4) and type(model).__name__ == "DeepseekV32ForCausalLM"
    ids = tokens(2, TINY_DSA.index_topk)
    whole = model(ids).logits
    with bypassed(model):
        assert (model(ids).logits - stock(ids).logits).abs().max() < 0.01
    assert (whole - stock(ids).logits).abs().max() > 0.1
    ids = tokens(2, 40)
    whole = model(ids).logits
    with scrambled(model, torch.Generator().manual_seed(0)):
        assert not torch.equal(model(ids).logits, whole)
    assert torch.equal(model(ids).logits, whole)


def test_tokenizer_stays_the_bases_in_both_releases(tmp_path):
    """V2-Lite declares LlamaTokenizerFast for a vocabulary of bytes. 5.9.0 corrects that for deepseek_v2 only."""
    base = make_tiny_tokenizer(make_tiny_base(tmp_path / "base"))
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    save = write_run(tmp_path / "save", base)
    for layout in LAYOUTS:
        export(save, base, tmp_path / layout, layout=layout, progress=False)
    assert (tmp_path / "hybrid" / "tokenizer_config.json").read_bytes() == (base / "tokenizer_config.json").read_bytes()
    code = (
        "import sys; from transformers import AutoTokenizer as T\n"
        "for path in sys.argv[1:]:\n"
        "    print('ids', T.from_pretrained(path, trust_remote_code=True)('Hello, été\\n 注意')['input_ids'])"
    )
    names = [str(tmp_path / name) for name in ("base", *LAYOUTS)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_MODULES_CACHE": str(tmp_path / "m")}
    for python in (verl_python(), sys.executable):
        done = subprocess.run([python, "-c", code, *names], env=environment, capture_output=True, text=True, timeout=120)
        ids = [line for line in done.stdout.splitlines() if line.startswith("ids ")]
        assert len(ids) == 3 and len(set(ids)) == 1, done.stdout + done.stderr[-2000:]
