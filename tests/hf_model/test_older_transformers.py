"""The same directory in verl's environment: transformers 5.9.0, which has no `deepseek_v32` and other cache names."""

import json
import os
import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.hf_model.hybrid import SETTINGS, tokens
from tests.hf_model.other_environment import verl_python


def run_elsewhere(directory: Path, ids: torch.Tensor, work: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """(report, tensors) of `load_and_run.py` under the other interpreter, in a clean environment."""
    save_file({"ids": ids}, work / "tokens.safetensors")
    script = Path(__file__).with_name("load_and_run.py")
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(work / "modules"), "OMP_NUM_THREADS": "1"}
    command = [verl_python(), script, directory, work / "tokens.safetensors", work]
    done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((work / "report.json").read_text()), load_file(work / "out.safetensors")


def test_loads_and_agrees_on_5_9(export_dir, model, tmp_path):
    """Empty loading report, no foreign import, logits and selection of 5.24, and generation with a cache."""
    ids = tokens(2, 5 * SETTINGS.index_topk)
    report, out = run_elsewhere(export_dir, ids, tmp_path)
    assert report["transformers"].startswith("5.9."), report
    assert report["class"] == "DeepseekV2DsaForCausalLM" and report["dtypes"] == ["torch.float32"]
    assert report["problems"] == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    assert report["foreign_modules"] == [] and report["cache_agrees"] and report["padding_agrees"]
    chosen = []
    for i in model.config.dsa_layers:
        model.model.layers[i].self_attn.selection_observer = chosen.append
    with torch.no_grad():
        logits = model(ids).logits
    assert torch.equal(torch.stack(chosen), out["chosen"].bool())
    assert (logits - out["logits"]).abs().max() <= 2e-5
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 2}
    assert torch.equal(model.generate(ids, **options, eos_token_id=None), out["generated"])
