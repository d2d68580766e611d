"""Speed of `dsa-upcycle export` against `cp -r` of the base, its memory, and what loading a base takes above the model.

    python benchmarks/load_export.py --gigabytes 4 --repeats 3 [--folder DIR] [--json FILE]

Builds a synthetic bf16 base in V2-Lite's form (hidden 1,024, 64 experts a layer, 500 MB shards) and a training checkpoint of one DSA
layer on it in --folder, and takes turns: export in a fresh process, `cp -r` of the base and `sync` in a fresh process. Both read files
that have left the page cache and end when their output is on the disk; the export's also holds the new layer, and every byte was hashed.
Memory is the process's largest resident set. Loading is measured by the same figure, less what the process held before and the model's
own bytes.
"""

import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import sides
import torch
import tyro
from random_model import CONFIG, architecture

GOAL_SPEED, GOAL_MEMORY_MB, GOAL_TENSORS = 0.8, 500.0, 2.0
SHARD_BYTES, DSA_LAYERS = 500_000_000, 1
SIZES = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096, "moe_intermediate_size": 704, "num_attention_heads": 8,
    "n_routed_experts": 64, "kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64,
    "v_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
LAYER_BYTES = 290e6  # of one MoE layer, about


@dataclass
class Arguments:
    gigabytes: float = 4.0
    """Size of the base, in 1e9 bytes."""
    repeats: int = 3
    folder: Path | None = None
    """Where to build; default: a temporary folder."""
    json: Path | None = None
    """Also write the figures here."""


def build(folder: Path, gigabytes: float) -> tuple[Path, Path]:
    """(base, --save directory of a run on it); random finite weights."""
    from megatron_patch.checkpoint.hf_mapping import dsa_names, hybrid_mapping, sizes
    from megatron_patch.checkpoint.manifest import LATEST_FILE, WEIGHTS_FILE, BaseReference, TrainingManifest
    from megatron_patch.io.hashes import directory_identity
    from megatron_patch.io.write_safetensors import write_safetensors
    from megatron_patch.model.architecture import DsaSettings
    from megatron_patch.model.layer_pattern import appended_pattern

    base, iteration = folder / "base", folder / "save" / "iter_0000010"
    base.mkdir()
    iteration.mkdir(parents=True)
    config = CONFIG | SIZES | {"num_hidden_layers": max(2, round(gigabytes * 1e9 / LAYER_BYTES))}
    (base / "config.json").write_text(json.dumps(config))
    (base / "tokenizer.json").write_text("{}")
    arch, dsa = architecture(config), DsaSettings(256, 8, 64)
    pattern = appended_pattern(arch.num_layers, DSA_LAYERS)
    mapping = hybrid_mapping(arch, pattern)
    shapes, trained = mapping.shapes(sizes(arch, dsa)), dsa_names(mapping, arch)
    above = {hf for sources in trained.values() for hf in sources}
    noise = torch.randn(1 << 26).to(torch.bfloat16)
    parts: list[dict] = [{}]
    for name, shape in shapes.items():
        if name in above:
            continue
        if sum(t.nbytes for t in parts[-1].values()) > SHARD_BYTES:
            parts.append({})
        parts[-1][name] = noise[: torch.Size(shape).numel()].view(shape)
    weight_map = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        write_safetensors(base / file, part)
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.nbytes for part in parts for t in part.values())
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    tensors = {}
    for name, sources in trained.items():
        shape = shapes[sources[0]]
        tensors[name] = noise[: len(sources) * torch.Size(shape).numel()].view(len(sources) * shape[0], *shape[1:])
    manifest = TrainingManifest(
        kind="pretrain", iteration=10, consumed_samples=1, consumed_tokens=1, base=BaseReference(str(base), directory_identity(base)),
        layer_pattern=pattern, dsa=dsa, q_rank=arch.hidden_size, frozen_sha256="0" * 64,
        files={WEIGHTS_FILE: write_safetensors(iteration / WEIGHTS_FILE, tensors)},
    )  # fmt: skip
    manifest.write(iteration)
    (folder / "save" / LATEST_FILE).write_text("10")
    return base, folder / "save"


def measure_export(base: Path, save: Path, folder: Path, repeats: int) -> list[dict]:
    out, copy = folder / "out", folder / "copy"
    program = (
        f"from megatron_patch.checkpoint.export import export; export({str(save)!r}, {str(base)!r}, {str(out)!r}, progress=False)"
    )
    import_seconds, _, import_bytes = sides.python("from megatron_patch.checkpoint.export import export")
    ours, theirs, resident = [], [], 0
    for _ in range(repeats):
        for leftover in (out, copy):
            shutil.rmtree(leftover, ignore_errors=True)
        sides.forget(base)
        seconds, cpu, used = sides.python(program)
        sides.forget(base)
        copied, cpu_of_cp, _ = sides.timed(["bash", "-c", f"cp -r '{base}' '{copy}' && sync '{copy}'/*"])
        ours.append(seconds - import_seconds)
        theirs.append(copied)
        resident = max(resident, used)
        print(
            f"export {seconds:.2f} s ({cpu:.1f} s of CPU; imports alone take {import_seconds:.2f} s and {import_bytes / 1e6:.0f} MB), "
            f"cp {copied:.2f} s ({cpu_of_cp:.1f} s of CPU)",
            flush=True,
        )
    size = sum(item.stat().st_size for item in base.rglob("*") if item.is_file()) / 1e9
    new = sum(item.stat().st_size for item in out.glob("model-dsa-*")) / 1e9
    theirs_scaled = statistics.median(theirs) * (size + new) / size  # the export writes the new layer as well
    name = f"load_export/{{}}/gigabytes={size:.1f}"
    return [
        sides.entry(name.format("export_time"), "s", statistics.median(ours), theirs_scaled, goal=GOAL_SPEED, repeats=repeats,
                    spread=max(ours) / min(ours) - 1),
        sides.entry(name.format("export_memory"), "MB", resident / 1e6, GOAL_MEMORY_MB, goal=1.0, repeats=repeats, spread=None),
    ]  # fmt: skip


LOAD = """
import re, torch
def peak():  # of this program: the figure of getrusage begins with that of the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
torch.set_num_threads(1)
from megatron_patch.devices.device import activate, initialize_distributed
device = activate("cpu")
initialize_distributed(device, 0)
from megatron_patch.checkpoint.load_base import load_base
from megatron_patch.model.architecture import DsaSettings, read_architecture
from megatron_patch.model.builder import BuildSettings, build_model
from megatron_patch.model.layer_pattern import appended_pattern
from megatron_patch.ops.backends import choose_backend
import time
arch = read_architecture({base!r})
pattern = appended_pattern(arch.num_layers, 0)
held = peak()
model, _ = build_model(arch, pattern, DsaSettings(256, 8, 64), BuildSettings(dtype=torch.bfloat16), choose_backend("auto", "cpu"))
size = sum(p.nbytes for p in model.parameters())
started = time.perf_counter()
load_base(model, {base!r}, arch, pattern, progress=False)
seconds = time.perf_counter() - started
above = peak() - held - size
print("LOADED", above, size, max(p.nbytes for p in model.parameters()), seconds)
"""


def measure_load(base: Path) -> list[dict]:
    sides.forget(base)
    _, _, printed = sides.timed([sys.executable, "-c", LOAD.format(base=str(base))])
    above, size, largest, seconds = map(float, printed.split("LOADED")[1].split()[:4])
    print(f"load: {size / 1e9:.2f} GB in {seconds:.2f} s; {above / 1e6:.0f} MB above the model, its largest tensor has {largest / 1e6:.0f} MB")
    name = f"load_export/load_memory/gigabytes={size / 1e9:.1f}"
    return [sides.entry(name, "MB", above / 1e6, GOAL_TENSORS * largest / 1e6, goal=1.0, repeats=1, spread=None)]


def main(arguments: Arguments) -> None:
    folder = Path(tempfile.mkdtemp(prefix="load_export_", dir=arguments.folder))
    try:
        base, save = build(folder, arguments.gigabytes)
        rows = measure_load(base) + measure_export(base, save, folder, arguments.repeats)
    finally:
        shutil.rmtree(folder)
    sides.publish(rows, arguments.json)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
