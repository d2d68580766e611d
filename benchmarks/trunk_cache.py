"""An epoch whose trunk outputs come from the cache against one that computes (and keeps) them: 27 base layers, 2 DSA layers.

    OMP_NUM_THREADS=1 python benchmarks/trunk_cache.py --json runs/trunk_cache.json
    python benchmarks/trunk_cache.py --quick        # small sizes, to see that it runs

The model is DeepSeek-V2-Lite at an eighth of its width (hidden size, MLPs, vocabulary; 16 experts of 64), random, fp32 with bf16
values in the cache. Both sides run whole optimizer steps over the same rows; `first` on an empty cache, `later` on a full one, and
`none` without a cache. Times are processor seconds of one thread for an epoch, the best of the repeats.
The last rows are no measurements: model FLOPs of a row with and without its trunk, of this model and of V2-Lite itself. Their ratio
bounds what the cache can give where all products run at one rate.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import random_model
import sides
import torch
import tyro
from random_model import V2_LITE

GOAL = 4.0
EIGHTH = V2_LITE | {
    "hidden_size": 256, "intermediate_size": 1368, "moe_intermediate_size": 176, "vocab_size": 12800, "n_routed_experts": 16,
    "num_attention_heads": 4, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}  # fmt: skip
INDEXER = (8, 64)  # heads, their size


@dataclass
class Arguments:
    quick: bool = False
    """Sizes of a smoke test; their figures mean nothing."""
    repeats: int = 3
    json: Path | None = None
    """Also write the figures here."""


def prepare(side: str, layers: int, tokens: int, rows: int, batch: int, topk: int) -> Callable[[], None]:
    """An epoch of `rows` rows of `tokens` tokens in steps of `batch` rows."""
    torch.set_num_threads(1)
    dsa = {"index_topk": topk, "index_n_heads": INDEXER[0], "index_head_dim": INDEXER[1]}
    arch, pattern, settings, model, state, device = random_model.build(EIGHTH | {"num_hidden_layers": layers}, 2, dsa)
    ddp, optimizer = random_model.with_optimizer(model)
    from megatron_patch.data.batch import Row, collate
    from megatron_patch.data.row_store import RowStore, create_or_check
    from megatron_patch.planning.flops import FlopsCounter
    from megatron_patch.training.step import TrainStep
    from megatron_patch.training.trunk_cache import CachedTrunk

    torch.manual_seed(0)
    state.recall = False
    ids = torch.randint(0, arch.vocab_size, (rows, tokens + 1))
    batches = [collate([(Row(row[:-1], row[1:], torch.ones(tokens), number), True)]) for number, row in enumerate(ids)]
    starts, folder = torch.arange(rows + 1).numpy() * tokens, Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def empty_cache() -> CachedTrunk:
        shutil.rmtree(folder)
        create_or_check(folder, {"dtype": "bf16"}, starts, arch.hidden_size, {})
        store = RowStore(folder, starts, arch.hidden_size, "bf16")
        store.reserve(torch.arange(rows).numpy(), lambda line: None)
        return CachedTrunk(model, state, store, layers, device)

    step = TrainStep(ddp, optimizer, state, device, 1.0, FlopsCounter(arch, pattern, settings))

    def epoch() -> None:
        if side == "first":
            step.trunk = empty_cache()
        shares = [step(batches[at : at + batch], "sparse").trunk_cached for at in range(0, rows, batch)]
        assert set(shares) == {{"first": 0.0, "later": 1.0, "none": None}[side]}, shares

    if side == "later":
        step.trunk = empty_cache()
        [step(batches[at : at + batch], "sparse") for at in range(0, rows, batch)]
    else:
        step(batches[:batch], "sparse")  # what is made once: the optimizer's state, PyTorch's own buffers
    return epoch


def model_flops(tokens: int, layers: int, dsa: tuple[int, int, int], sizes: dict) -> tuple[float, float]:
    """GFLOP of one row with its trunk in the cache, and without; `dsa`: top-k, index heads, their size."""
    from megatron_patch.devices import cpu_redirect

    cpu_redirect.install()
    from megatron_patch.model.architecture import DsaSettings
    from megatron_patch.model.layer_pattern import appended_pattern
    from megatron_patch.planning.flops import FlopsCounter

    arch = random_model.architecture(sizes | {"num_hidden_layers": layers})
    count = FlopsCounter(arch, appended_pattern(layers, 2), DsaSettings(*dsa))
    return count([tokens], False, []).total / 1e9, count([tokens], False).total / 1e9


def main(arguments: Arguments) -> None:
    case = {"layers": 27, "tokens": 512, "rows": 8, "batch": 4, "topk": 128}
    if arguments.quick:
        case |= {"layers": 3, "tokens": 64, "rows": 4, "batch": 2}
    found = {side: sides.measure(__file__, side, case, arguments.repeats) for side in ("later", "first", "none")}
    later, name = found["later"], f"trunk_cache/{{}}/layers={case['layers']}+2/tokens={case['tokens']}"
    lines = [
        sides.entry(
            name.format(f"later_epoch_against_{side}"), "CPU s", later.best_cpu, found[side].best_cpu,
            goal=GOAL if side == "first" else None, repeats=arguments.repeats, spread=sides.spread(later),
        )
        for side in ("first", "none")
    ]  # fmt: skip
    here = (case["tokens"], case["layers"], (case["topk"], *INDEXER), EIGHTH)
    for model, sizes in (("this model", here), ("V2-Lite", (4096, 27, (2048, 64, 128), V2_LITE))):
        name = f"trunk_cache/model_flops/{model}/tokens={sizes[0]}"
        lines.append(sides.entry(name, "GFLOP a row", *model_flops(*sizes), goal=None, repeats=0, spread=None))
    sides.publish(lines, arguments.json)


if __name__ == "__main__":
    sides.serve(prepare)
    main(tyro.cli(Arguments, description=__doc__))
