"""A checkpoint of verl's FSDP trainer -> a Hugging Face directory like the one that the run started from.

    python -m megatron_patch.verl.merge --checkpoint runs/grpo/checkpoints/global_step_200/actor --model NATIVE --output DIR

verl's own merger joins the weights (in bf16). It leaves no model code and a configuration as transformers rewrites it, without the
RoPE keys that engines read; those files come from the directory that the run started from. Runs in verl's environment.
"""

import argparse
import json
import runpy
import shutil
import sys
from pathlib import Path

from megatron_patch.errors import UserError, run

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
OF_ITS_OWN = ("README.md", "upcycle_manifest.json")  # they describe the model before this training


def merge(checkpoint: Path, model: Path, output: Path) -> None:
    """Write the directory.

    Raises:
        UserError: no FSDP checkpoint, no native export, or an output that is not empty.
    """
    if not (checkpoint / "fsdp_config.json").is_file():
        raise UserError(
            f"--checkpoint must be the actor of verl's FSDP trainer: {checkpoint} has no fsdp_config.json; give .../global_step_N/actor"
        )
    if not (model / "config.json").is_file():
        raise UserError(
            f"--model must be the directory that the run started from: {model} has no config.json; give MODEL of the run"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(
            f"--output must be a new or empty directory: {output} is not empty; give another path or empty it"
        )
    import megatron_patch.verl.external  # noqa: F401  (registers the class that the merger builds)

    partial = output.absolute().with_name(f".{output.name}.partial-merge")
    shutil.rmtree(partial, ignore_errors=True)
    said, sys.argv = (
        sys.argv,
        ["model_merger", "merge", "--backend", "fsdp", "--local_dir", str(checkpoint), "--target_dir", str(partial)],
    )
    try:
        runpy.run_module("verl.model_merger", run_name="__main__")
    finally:
        sys.argv = said
    weights = {file.name for pattern in WEIGHTS for file in partial.glob(pattern)}
    for file in [file for file in partial.iterdir() if file.name not in weights]:
        file.unlink()
    base_weights = {file.name for pattern in WEIGHTS for file in model.glob(pattern)}
    for file in model.iterdir():
        if file.is_file() and file.name not in (*base_weights, *OF_ITS_OWN):
            shutil.copy(file, partial / file.name)
    config = json.loads((model / "config.json").read_text(encoding="utf-8")) | {"torch_dtype": "bfloat16"}
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if output.exists():
        output.rmdir()
    partial.rename(output)


def main() -> None:
    parser = argparse.ArgumentParser(prog="merge", description=__doc__.splitlines()[0])
    for name in ("checkpoint", "model", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    merge(**vars(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(run(main))
