"""Speed and memory of `dsa-upcycle prune apply`, against `cp` of the bytes that it keeps.

    python benchmarks/prune_apply.py --gigabytes 4 --repeats 3 [--folder DIR] [--json FILE]

Builds a synthetic DeepSeek-V3-shaped FP8 checkpoint of random bytes (experts with scales, 1 GB shards, a router and a bias
a layer) in --folder, keeps every second expert, and takes turns: apply in a fresh process, then `cp` of the output's files
in a fresh process. Both start with the files that they read out of the page cache and end when their output is on the
disk: apply flushes its files itself, after cp the time of `sync` on its files is added. Memory is the process's largest
resident set, and the part of it that importing the command takes is printed too.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # also where a test imports it

from sides import forget, python, timed  # noqa: E402

from megatron_patch import __version__  # noqa: E402
from megatron_patch.io.raw_safetensors import header_bytes  # noqa: E402

GOAL = 0.7
LAYERS, EXPERTS, HIDDEN = 4, 64, 1024
SHARD_BYTES = 1 << 30


def build(folder: Path, total: int) -> Path:
    """A checkpoint of about `total` bytes: the experts' inner size follows from it."""
    inner = max(128, total // (LAYERS * EXPERTS * 3 * HIDDEN) // 128 * 128)
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": HIDDEN, "vocab_size": 64,
        "num_hidden_layers": LAYERS + 1, "first_k_dense_replace": 1, "n_routed_experts": EXPERTS, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "num_nextn_predict_layers": 0, "moe_intermediate_size": inner,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    tensors: list[tuple[str, str, tuple[int, ...], int]] = [("model.embed_tokens.weight", "BF16", (64, HIDDEN), 64 * HIDDEN * 2)]
    for layer in range(1, LAYERS + 1):
        mlp = f"model.layers.{layer}.mlp"
        tensors.append((f"{mlp}.gate.weight", "BF16", (EXPERTS, HIDDEN), EXPERTS * HIDDEN * 2))
        tensors.append((f"{mlp}.gate.e_score_correction_bias", "F32", (EXPERTS,), EXPERTS * 4))
        for expert in range(EXPERTS):
            for name, rows, columns in (("gate", inner, HIDDEN), ("up", inner, HIDDEN), ("down", HIDDEN, inner)):
                leaf = f"{mlp}.experts.{expert}.{name}_proj.weight"
                scale = (-(-rows // 128), -(-columns // 128))
                tensors.append((leaf, "F8_E4M3", (rows, columns), rows * columns))
                tensors.append((leaf + "_scale_inv", "F32", scale, scale[0] * scale[1] * 4))
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    parts: list[list] = [[]]
    for tensor in tensors:
        if sum(t[3] for t in parts[-1]) + tensor[3] > SHARD_BYTES:
            parts.append([])
        parts[-1].append(tensor)
    weight_map, noise = {}, os.urandom(1 << 24)
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        with open(model / file, "wb") as writer:
            writer.write(header_bytes(part, {"format": "pt"}))
            left = sum(t[3] for t in part)
            while left:
                left -= writer.write(noise[: min(left, len(noise))])
        weight_map |= dict.fromkeys((t[0] for t in part), file)
    index = {"metadata": {"total_size": sum(t[3] for t in tensors)}, "weight_map": weight_map}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return model


def make_plan(model: Path, file: Path) -> None:
    """Keep every second expert, by the package's own planner on counts that say so."""
    import torch

    from megatron_patch.pruning.plan import make_plan
    from megatron_patch.pruning.statistics import SourceStatistics, Statistics, model_sha256
    from megatron_patch.pruning.wish import Wish

    count = torch.tensor([8, 0] * (EXPERTS // 2)).repeat(LAYERS, 1)
    seen = SourceStatistics.routed_only(int(count[0].sum()) // 8, count)
    layers = tuple(range(1, LAYERS + 1))
    Statistics("deepseek_v3", model_sha256(model), layers, EXPERTS, 8, {"x": seen}).save(file.with_suffix(".stats"))
    file.write_text(json.dumps(make_plan(model, Wish(keep=EXPERTS // 2), file.with_suffix(".stats"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the synthetic checkpoint, in 1e9 bytes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to build; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prune_apply_", dir=args.folder))
    try:
        result = measure(folder, args.gigabytes, args.repeats)
    finally:
        shutil.rmtree(folder)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(folder: Path, gigabytes: float, repeats: int) -> list[dict]:
    model, plan = build(folder, int(gigabytes * 1e9)), folder / "plan.json"
    make_plan(model, plan)
    out, copy = folder / "out", folder / "copy"
    import_seconds, import_cpu, import_bytes = python("from megatron_patch.pruning import apply")
    apply = f"from megatron_patch.pruning import apply; apply.run({str(model)!r}, {str(plan)!r}, {str(out)!r})"
    ours, theirs, resident = [], [], 0
    for _ in range(repeats):
        for leftover in (out, copy):
            shutil.rmtree(leftover, ignore_errors=True)
        forget(model)
        seconds, cpu, used = python(apply)
        ours.append(seconds)
        resident = max(resident, used)
        forget(out)
        copied, cpu_of_cp, _ = timed(["bash", "-c", f"cp -r '{out}' '{copy}' && sync '{copy}'/*"])
        theirs.append(copied)
        print(
            f"apply {seconds:.2f} s ({cpu:.1f} s of CPU; imports alone take {import_seconds:.2f} and {import_cpu:.1f}), "
            f"cp {copied:.2f} s ({cpu_of_cp:.1f} s of CPU)",
            flush=True,
        )
    kept = sum(item.stat().st_size for item in out.rglob("*") if item.is_file())
    size = sum(item.stat().st_size for item in model.rglob("*") if item.is_file())
    best = statistics.median(theirs) / statistics.median(ours)
    spread = max(ours) / min(ours) - 1
    print(
        f"{size / 1e9:.2f} GB -> {kept / 1e9:.2f} GB: apply {kept / 1e6 / statistics.median(ours):.0f} MB/s, cp "
        f"{kept / 1e6 / statistics.median(theirs):.0f} MB/s, ratio {best:.2f} (goal {GOAL}); largest resident set "
        f"{resident / 1e6:.0f} MB, of which imports {import_bytes / 1e6:.0f} MB"
    )
    versions = {"megatron_patch": __version__, "python": sys.version.split()[0], "kernel": os.uname().release}
    return [
        {"name": f"prune_apply/time/gigabytes={gigabytes:g}", "unit": "s", "ours": statistics.median(ours), "theirs": statistics.median(theirs),
         "ratio": best, "goal": GOAL, "repeats": repeats, "spread": spread, "versions": versions},
        {"name": f"prune_apply/resident_bytes/gigabytes={gigabytes:g}", "unit": "B", "ours": resident, "theirs": 1_000_000_000,
         "ratio": 1e9 / resident, "goal": 1.0, "repeats": repeats, "spread": 0.0, "versions": versions},
    ]  # fmt: skip


if __name__ == "__main__":
    main()
