"""Run as a script by another interpreter: load a directory with its own code, write logits and a report.

python load_and_run.py DIRECTORY TOKENS.safetensors OUTPUT_FOLDER
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def main(directory: str, tokens_file: str, output: str) -> None:
    torch.set_num_threads(1)
    ids = load_file(tokens_file)["ids"]
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=True, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    model.eval()
    chosen = []
    for i in model.config.dsa_layers:
        model.model.layers[i].self_attn.selection_observer = chosen.append
    with torch.no_grad():
        logits = model(ids).logits
        chosen = torch.stack(chosen[: len(model.config.dsa_layers)])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 2}
    cached = model.generate(ids, **options, eos_token_id=None)
    plain = model.generate(ids, **options, eos_token_id=None, use_cache=False)
    padding = 7  # on the left, as in a batch of prompts
    padded = torch.nn.functional.pad(ids, (padding, 0), value=2)
    options["attention_mask"] = torch.nn.functional.pad(options["attention_mask"], (padding, 0))
    padded = model.generate(padded, **options, eos_token_id=None)[:, padding:]
    save_file(
        {"logits": logits, "chosen": chosen.to(torch.uint8), "generated": cached}, Path(output) / "out.safetensors"
    )
    report = {
        "transformers": transformers.__version__,
        "class": type(model).__name__,
        "frozen": sum(not p.requires_grad for p in model.parameters()),
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "problems": {
            key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        },
        "foreign_modules": [
            name for name in sys.modules if "deepseek_v32" in name or name.startswith("megatron")
        ],  # accelerate, which verl brings, has a module of its own named after Megatron
        "cache_agrees": bool(torch.equal(cached, plain)),
        "padding_agrees": bool(torch.equal(cached, padded)),
    }
    (Path(output) / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
