"""The routed experts of one frozen layer: megatron-core's loop over experts against one grouped product of all.

    python benchmarks/experts.py --json runs/experts.json

`ours` is what a run uses (`SequentialMLP`, without autograd, as in the trunk), `theirs` is `torch.nn.functional.grouped_mm` over stacked
weights. Both get the tokens sorted by expert, and their results are compared. A ratio near 1 says that the loop costs nothing here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import random_model
import sides
import torch
import torch.nn.functional as F
import tyro


@dataclass
class Arguments:
    tokens: int = 1024
    repeats: int = 7
    real_width: bool = False
    """V2-Lite's widths (2,048 x 1,408) in bf16 instead of 512 x 256 in fp32."""
    json: Path | None = None
    """Also write the figures here."""


def prepare(side: str, tokens: int, real_width: bool) -> Callable[[], object]:
    torch.set_num_threads(1)
    sizes = random_model.SMALL | {"num_hidden_layers": 2, "vocab_size": 64}
    if real_width:
        sizes = random_model.V2_LITE | {"num_hidden_layers": 2, "vocab_size": 64}
    dtype = torch.bfloat16 if real_width else torch.float32
    arch, _, _, model, _, _ = random_model.build(sizes, 1, {"index_topk": 16, "index_n_heads": 1, "index_head_dim": 64}, dtype=dtype)
    experts = model.decoder.layers[1].mlp.experts
    generator = torch.Generator().manual_seed(2)
    chosen = torch.rand(tokens, arch.num_experts, generator=generator).topk(arch.experts_per_token).indices
    counts = torch.bincount(chosen.flatten(), minlength=arch.num_experts)
    x = torch.randn(int(counts.sum()), arch.hidden_size, generator=generator).to(dtype)
    weights = torch.rand(len(x), generator=generator)
    first = torch.stack([e.linear_fc1.weight.detach().T for e in experts.local_experts])
    second = torch.stack([e.linear_fc2.weight.detach().T for e in experts.local_experts])
    ends = counts.cumsum(0).int()

    @torch.no_grad()
    def loop() -> torch.Tensor:
        return experts(x, counts, weights)[0]

    @torch.no_grad()
    def grouped() -> torch.Tensor:
        gate, up = F.grouped_mm(x, first, offs=ends).chunk(2, -1)
        return F.grouped_mm((F.silu(gate) * up * weights[:, None]).to(dtype), second, offs=ends)

    torch.testing.assert_close(loop(), grouped(), rtol=0.02 if real_width else 1e-4, atol=1e-3)
    return {"loop": loop, "grouped": grouped}[side]


def main(arguments: Arguments) -> None:
    case = {"tokens": arguments.tokens, "real_width": arguments.real_width}
    ours, theirs = (sides.measure(__file__, side, case, arguments.repeats) for side in ("loop", "grouped"))
    name = f"experts/time/tokens={arguments.tokens}/{'real_width' if arguments.real_width else 'small'}"
    row = sides.entry(name, "s", ours.best_cpu, theirs.best_cpu, goal=None, repeats=arguments.repeats, spread=sides.spread(ours))
    sides.publish([row], arguments.json)


if __name__ == "__main__":
    sides.serve(prepare)
    main(tyro.cli(Arguments, description=__doc__))
