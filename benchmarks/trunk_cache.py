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

import sides
import torch
import tyro

GOAL = 4.0
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": 6, "routed_scaling_factor": 1.0, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": None, "tie_word_embeddings": False, "attention_bias": False, "initializer_range": 0.02,
}  # fmt: skip
EIGHTH = {
    "hidden_size": 256, "intermediate_size": 1368, "moe_intermediate_size": 176, "vocab_size": 12800, "n_routed_experts": 16,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64,
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


def architecture(**changes):
    from megatron_patch.model.architecture import architecture_from_config

    return architecture_from_config(V2_LITE | changes, where="benchmark")


def prepare(side: str, layers: int, tokens: int, rows: int, batch: int, topk: int) -> Callable[[], None]:
    """An epoch of `rows` rows of `tokens` tokens in steps of `batch` rows."""
    torch.set_num_threads(1)
    from megatron_patch.devices.device import activate, initialize_distributed

    device = activate("cpu")
    initialize_distributed(device, seed=1)
    from megatron_patch.config import OptimizerSettings
    from megatron_patch.data.batch import Row, collate
    from megatron_patch.data.row_store import RowStore, create_or_check
    from megatron_patch.model.architecture import DsaSettings
    from megatron_patch.model.builder import BuildSettings, build_model
    from megatron_patch.model.freeze import freeze_base
    from megatron_patch.model.layer_pattern import appended_pattern
    from megatron_patch.ops.backends import choose_backend
    from megatron_patch.planning.flops import FlopsCounter
    from megatron_patch.training.optimizer import build_optimizer, wrap_ddp
    from megatron_patch.training.step import TrainStep
    from megatron_patch.training.trunk_cache import CachedTrunk

    arch = architecture(**EIGHTH, num_hidden_layers=layers)
    pattern, dsa = appended_pattern(layers, 2), DsaSettings(topk, *INDEXER)
    model, state = build_model(arch, pattern, dsa, BuildSettings(), choose_backend("auto", "cpu"))
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter) if parameter.dim() == 1 else torch.nn.init.normal_(parameter, std=0.02)
    freeze_base(model, pattern)
    ddp = wrap_ddp(model, use_distributed_optimizer=False)
    optimizer = build_optimizer(ddp, OptimizerSettings(), bf16=False, use_distributed_optimizer=False)
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

    step = TrainStep(ddp, optimizer, state, device, 1.0, FlopsCounter(arch, pattern, dsa))

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


def model_flops(tokens: int, layers: int, dsa: tuple[int, int, int], changes: dict) -> tuple[float, float]:
    """GFLOP of one row with its trunk in the cache, and without; `dsa`: top-k, index heads, their size."""
    from megatron_patch.devices import cpu_redirect

    cpu_redirect.install()
    from megatron_patch.model.architecture import DsaSettings
    from megatron_patch.model.layer_pattern import appended_pattern
    from megatron_patch.planning.flops import FlopsCounter

    count = FlopsCounter(architecture(**changes, num_hidden_layers=layers), appended_pattern(layers, 2), DsaSettings(*dsa))
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
    for model, sizes in (("this model", here), ("V2-Lite", (4096, 27, (2048, 64, 128), {}))):
        name = f"trunk_cache/model_flops/{model}/tokens={sizes[0]}"
        lines.append(sides.entry(name, "GFLOP a row", *model_flops(*sizes), goal=None, repeats=0, spread=None))
    sides.publish(lines, arguments.json)


if __name__ == "__main__":
    sides.serve(prepare)
    main(tyro.cli(Arguments, description=__doc__))
