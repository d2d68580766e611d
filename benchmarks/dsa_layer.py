"""One DSA layer's op, forward + backward + indexer KL, in fp32 on one thread: ours against megatron-core's own, and its bounds.

    python benchmarks/dsa_layer.py --json runs/dsa_layer.json
    python benchmarks/dsa_layer.py --quick                # small sizes, to see that it runs

* `mcore`: megatron-core 0.16.1's `DSAttention` itself, sparse KL. Its Hadamard rotation is replaced by the identity (it needs
  CUDA and leaves the scores unchanged), and its projections and RoPE by the tensors that ours gets, so that both compute the same
  function of the same inputs; tests/test_dsa_layer_benchmark.py holds that they do.
* `lengths`: the sparse op against the chunked one, of documents of some lengths: which of them `--dsa-backend auto` takes.
* `sdpa`: dense causal `scaled_dot_product_attention`, V padded to the width of K, without which PyTorch leaves its fused kernel.
* The floor is the time that the needed products take at the rate of a 1,024-wide matrix product, measured in the same run, by
  PyTorch's own mm and by the one that the op uses (`megatron_patch.ops.products`):

      index scores over all causal pairs + twice that over the selected pairs + 3.5 x attention over the selected pairs

  with 2 J E operations a pair for J x E index heads and 2 H (D + V) for H heads of D/V.

Times are processor seconds, the best of the repeats (of mcore's class, one: it takes half a minute). Memory is the rise of the
peak above the inputs in one forward and backward pass, gradients included.
`ours` leaves `index_recall` out, as training does but for the steps that are logged; mcore's class has none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import sides
import torch
import tyro
from torch import Tensor

LENGTHS = ((128, 16), (256, 16), (256, 128), (512, 64), (512, 128), (1024, 256), (2048, 256))  # tokens, top-k
MCORE_GOALS = {256: (20.0, 25.0), 1024: (9.0, 20.0)}  # top-k: time, memory
FLOOR_GOAL, EXPONENT_GOAL, SDPA_GOAL = 1.7, 1.1, 2.0
RATE_SIZE = 1024  # of the matrix product whose rate makes the floor
RATES = "mm", "product"


@dataclass
class Arguments:
    quick: bool = False
    """Sizes of a smoke test; their figures mean nothing."""
    parts: tuple[str, ...] = ("mcore", "growth", "sdpa", "lengths")
    """Which measurements to make."""
    repeats: int = 2
    json: Path | None = None
    """Also write the figures here."""


@dataclass(frozen=True)
class Sizes:
    tokens: int
    topk: int
    heads: int = 16
    dim: int = 192
    value_dim: int = 128
    index_heads: int = 32
    index_dim: int = 128


def make_inputs(sizes: Sizes) -> tuple[list[Tensor], Tensor]:
    """(query, key, value, index_query, index_key, index_weights, all to be differentiated; the gradient of the output)."""
    generator = torch.Generator().manual_seed(0)
    t, h, j = sizes.tokens, sizes.heads, sizes.index_heads
    shapes = (t, h, sizes.dim), (t, h, sizes.dim), (t, h, sizes.value_dim), (t, j, sizes.index_dim), (t, sizes.index_dim), (t, j)
    inputs = [torch.randn(*shape, generator=generator) for shape in shapes]
    inputs[-1] *= (j * sizes.index_dim) ** -0.5
    return [x.requires_grad_() for x in inputs], torch.randn(*shapes[2], generator=generator)


def prepare(side: str, **case: int) -> Callable[[], None]:
    torch.set_num_threads(1)
    if side in RATES:
        from megatron_patch.ops.products import product

        a, b = torch.rand(2, RATE_SIZE, RATE_SIZE).unbind()
        multiply = {"mm": lambda: a @ b.T, "product": lambda: product(a, b, True)}[side]
        return lambda: [multiply() for _ in range(8)] and None
    sizes = Sizes(**case)
    inputs, d_out = make_inputs(sizes)
    # Before memory is read: the libraries' own buffers, and what PyTorch imports with its first backward pass (50 MiB).
    one = torch.rand(256, 256, requires_grad=True)
    torch.autograd.backward([(one @ one).sum()], [torch.ones(())])
    forward = {"ours": ours, "chunked": chunked, "mcore": mcore, "sdpa": sdpa}[side](inputs, sizes)

    def work() -> None:
        for x in inputs:
            x.grad = None
        outputs = forward()
        torch.autograd.backward(outputs, [d_out, torch.tensor(1 / sizes.tokens)][: len(outputs)])

    return work


def ours(inputs: list[Tensor], sizes: Sizes, backend: str = "sparse") -> Callable[[], list[Tensor]]:
    from megatron_patch.ops.backends import choose_backend
    from megatron_patch.ops.compiled import sampled_product

    for width in (sizes.dim, sizes.value_dim):  # numba and its compiler, 130 MiB once a process, are a library's own, too
        sampled_product(torch.rand(1, width), torch.rand(1, width), torch.zeros(1, 1, dtype=torch.int32), torch.empty(1, 1))
    attention, ends = choose_backend(backend, "cpu").attention, torch.tensor([0, sizes.tokens], dtype=torch.int32)

    def forward() -> list[Tensor]:
        result = attention(*inputs, ends, topk=sizes.topk, softmax_scale=sizes.dim**-0.5, recall=False)
        return [result.out, result.indexer_kl]

    return forward


def chunked(inputs: list[Tensor], sizes: Sizes) -> Callable[[], list[Tensor]]:
    return ours(inputs, sizes, "chunked")


def sdpa(inputs: list[Tensor], sizes: Sizes) -> Callable[[], list[Tensor]]:
    query, key, value = (x.transpose(0, 1)[None] for x in inputs[:3])

    def forward() -> list[Tensor]:
        padded = torch.nn.functional.pad(value, (0, sizes.dim - sizes.value_dim))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, padded, is_causal=True)
        return [out[0, ..., : sizes.value_dim].transpose(0, 1)]

    return forward


class Given(torch.nn.Module):
    """In place of a projection: the tensor itself, [T, 1, -1], without a bias."""

    def __init__(self, tensor: Tensor):
        super().__init__()
        self.result = tensor.flatten(1)[:, None]

    def forward(self, _: Tensor) -> tuple[Tensor, None]:
        return self.result, None


def mcore(inputs: list[Tensor], sizes: Sizes) -> Callable[[], list[Tensor]]:
    from megatron_patch.devices import cpu_redirect

    cpu_redirect.install()
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    dsa.rotate_activation = lambda x: x
    dsa.DSAIndexer._apply_rope = lambda self, x, *_: x
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=sizes.heads,
        q_lora_rank=64,
        qk_pos_emb_head_dim=sizes.index_dim // 2,
        rope_type="rope",
        dsa_indexer_n_heads=sizes.index_heads,
        dsa_indexer_head_dim=sizes.index_dim,
        dsa_indexer_topk=sizes.topk,
        dsa_indexer_loss_coeff=1.0,
        dsa_indexer_use_sparse_loss=True,
    )
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    names = ("linear_wq_b", "linear_wk", "k_norm", "linear_weights_proj")
    parts = dsa.DSAIndexerSubmodules(**dict.fromkeys(names, torch.nn.Identity))
    submodules = dsa.DSAttentionSubmodules(ModuleSpec(dsa.DSAIndexer, submodules=parts))
    layer = dsa.DSAttention(
        config, submodules, 1, AttnMaskType.causal, "self", softmax_scale=sizes.dim**-0.5,
        pg_collection=SimpleNamespace(tp=one, cp=one),
    )  # fmt: skip
    unscaled = (sizes.index_heads * sizes.index_dim) ** 0.5  # the class scales the weights itself
    query, key, value = (x[:, None] for x in inputs[:3])
    unused = torch.zeros(sizes.tokens, 1, 64)

    def forward() -> list[Tensor]:
        layer.indexer.linear_wq_b, layer.indexer.linear_wk = Given(inputs[3]), Given(inputs[4])
        layer.indexer.linear_weights_proj = Given(inputs[5] * unscaled)
        out = layer(query, key, value, None, unused, unused, attn_mask_type=AttnMaskType.causal)
        return [out.view(sizes.tokens, sizes.heads, sizes.value_dim)]  # its backward pass starts that of the KL's mean

    return forward


def floor_flops(s: Sizes) -> float:
    """Operations of the formula above."""
    causal = s.tokens * (s.tokens + 1) / 2
    beyond = max(0, s.tokens - s.topk)
    selected = causal - beyond * (beyond + 1) / 2
    index, attention = 2 * s.index_heads * s.index_dim, 2 * s.heads * (s.dim + s.value_dim)
    return causal * index + selected * (2 * index + 3.5 * attention)


def measure(side: str, sizes: Sizes | None, repeats: int) -> sides.Measured:
    return sides.measure(__file__, side, vars(sizes) if sizes else {}, repeats)


def against_mcore(sizes: Sizes, goals: tuple[float, float], repeats: int) -> list[dict]:
    mine, theirs = measure("ours", sizes, repeats), measure("mcore", sizes, 1)
    memory_of_one = measure("ours", sizes, 1).memory  # as theirs: repeats leave holes in the heap
    name = f"dsa_layer/{{}}/tokens={sizes.tokens}/topk={sizes.topk}"
    time, memory = goals
    rows = [
        row(name.format("time"), "CPU s", mine.best_cpu, theirs.best_cpu, time, repeats),
        row(name.format("memory"), "MiB", memory_of_one, theirs.memory, memory, 1),
    ]
    for rate in RATES:
        second = 8 * 2 * RATE_SIZE**3 / measure(rate, None, 5).best_cpu  # operations in one
        floor = floor_flops(sizes) / second
        print(
            f"{name.format('floor')}: {floor_flops(sizes) / 1e9:.0f} GFLOP at {second / 1e9:.0f} GFLOP/s ({rate}) = {floor:.2f} s; "
            f"ours is {mine.best_cpu / floor:.2f} of it (at least 2.3 of mm's, goal {FLOOR_GOAL})"
        )
        rows.append(row(name.format(f"time_floor_of_{rate}"), "CPU s", mine.best_cpu, floor, 1 / FLOOR_GOAL, repeats))
    return rows


def row(name: str, unit: str, mine: float, theirs: float, goal: float, repeats: int) -> dict:
    return sides.entry(name, unit, mine, theirs, goal=goal, repeats=repeats, spread=None)


def growth(shortest: int, longest: int, topk: int) -> list[dict]:
    """The exponent of the tokens by which memory grows from the shortest to the longest document."""
    lengths = [shortest * 2**i for i in range(int(math.log2(longest / shortest)) + 1)]
    memory = [measure("ours", Sizes(tokens, topk), 1).memory for tokens in lengths]
    print("; ".join(f"{tokens} tokens: {m:.0f} MiB" for tokens, m in zip(lengths, memory, strict=True)))
    exponent = math.log(memory[-1] / memory[0]) / math.log(longest / shortest)
    name = f"dsa_layer/memory_exponent/tokens={shortest}..{longest}/topk={topk}"
    return [row(name, "exponent, theirs: the bound", exponent, EXPONENT_GOAL, 1.0, 1)]


def against_sdpa(sizes: Sizes, repeats: int) -> list[dict]:
    mine, theirs = measure("ours", sizes, repeats), measure("sdpa", sizes, repeats)
    name = f"dsa_layer/{{}}_against_sdpa/tokens={sizes.tokens}/topk={sizes.topk}"
    return [row(name.format("time"), "CPU s", mine.best_cpu, theirs.best_cpu, SDPA_GOAL, repeats)]


def by_length(lengths: tuple[tuple[int, int], ...], repeats: int) -> list[dict]:
    rows = []
    for tokens, topk in lengths:
        mine, theirs = (measure(side, Sizes(tokens, topk), repeats) for side in ("ours", "chunked"))
        name = f"dsa_layer/sparse_against_chunked/tokens={tokens}/topk={topk}"
        rows.append(row(name, "CPU s", mine.best_cpu, theirs.best_cpu, 1.0, repeats))
    return rows


def main(arguments: Arguments) -> None:
    quick, rows = arguments.quick, []
    if "mcore" in arguments.parts:
        for topk, goals in MCORE_GOALS.items():
            sizes = Sizes(256, topk // 8) if quick else Sizes(4096, topk)
            rows += against_mcore(sizes, goals, arguments.repeats)
    if "growth" in arguments.parts:
        rows += growth(256, 1024, 32) if quick else growth(2048, 16384, 256)
    if "sdpa" in arguments.parts:
        sizes = Sizes(512, 32, index_heads=4, index_dim=32) if quick else Sizes(16384, 256, index_heads=4, index_dim=32)
        rows += against_sdpa(sizes, arguments.repeats)
    if "lengths" in arguments.parts:
        rows += by_length(((64, 8),) if quick else LENGTHS, 5 * arguments.repeats)  # short ones: many repeats cost little
    sides.publish(rows, arguments.json)


if __name__ == "__main__":
    sides.serve(prepare)
    main(tyro.cli(Arguments, description=__doc__))
