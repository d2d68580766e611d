"""Does a fault that the small proxy shows also show in a larger model, and the other way round?

    bash benchmarks/twin.sh runs/twin        # a larger base, all of whose layers become DSA: about 15 minutes
    python benchmarks/fault_sensitivity.py --proxy runs/quickstart/export --twin runs/twin/native --json runs/faults.json

Each known fault (megatron_patch/faults.py) is planted in each model, as a rollout engine might have it while the trainer is
right. Three things that a team sees of it in RL:

    KL       of trainer against rollout, nats per answer token: mean KL of the two distributions
    grad     norm of the policy gradient over the right one's, when the trainer has the fault
    reward   exact match on the demo's tasks with the fault, minus without

A fault is *seen* in a model if one of them leaves the noise: a KL above that of the same right model in bf16, which is what
other kernels give; the norm off by more than 5%; or the reward by more than two standard errors. `stale_topk_recompute` is planted in the backward pass,
`attention_leaks_documents` in packed prompts; neither is a matter of the rollout, so their reward does not change.
"""

import contextlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoTokenizer

from megatron_patch.demo.base_training import encode_conversation
from megatron_patch.demo.corpus import load_corpus
from megatron_patch.demo.tasks import TASKS, suite_row
from megatron_patch.diagnosis.parity.planted import PLANTS, planted
from megatron_patch.diagnosis.parity.records import shadow
from megatron_patch.evaluation.loading import inspect_directory, load_model
from megatron_patch.faults import Fault

GRAD_SEEN, ERRORS_SEEN = 0.05, 2.0
BATCH = 20


@dataclass
class Arguments:
    proxy: Path
    """An export of the small model."""
    twin: Path
    """An export of a larger one, whose layers are all DSA."""
    rows: int = 40
    """Rows of each task."""
    json: Path | None = None
    """Also write the figures here."""


@dataclass
class Seen:
    """What a fault does to a model. None: it cannot have it."""

    kl: float
    grad_ratio: float
    reward_change: float
    reward_stderr: float
    noise: float  # KL of the right model in bf16

    @property
    def seen(self) -> bool:
        """Whether any of the three leaves the noise."""
        moved = abs(self.reward_change) > ERRORS_SEEN * self.reward_stderr and self.reward_change != 0
        return not self.kl <= self.noise or not abs(self.grad_ratio - 1) <= GRAD_SEEN or moved


@dataclass
class Prompts:
    """Rows of the suite as one batch, padded on the right, which causality hides: tokens, and which predict an answer's (bool)."""

    tokens: Tensor
    answer: Tensor


class Subject:
    """A model with its prompts."""

    def __init__(self, directory: Path, rows: int):
        self.model = load_model(inspect_directory(directory))
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        corpus, rng = load_corpus(1234), random.Random(77)
        chats = [suite_row(task, rng, corpus.held_out) for task in TASKS if task.taught_to_base for _ in range(rows)]
        self.batches = [self._batch(chats[i : i + BATCH]) for i in range(0, len(chats), BATCH)]
        self.clean = [self.distributions(batch) for batch in self.batches]
        self.clean_reward = self.rewards(self.clean)
        self.clean_norm = self.gradient_norm()
        self.noise = self.bf16_kl()

    def _batch(self, chats: list[dict]) -> Prompts:
        rows, answers = [], []
        for chat in chats:
            prompt = encode_conversation(self.tokenizer, chat["messages"])[0]
            whole = encode_conversation(self.tokenizer, [*chat["messages"], {"role": "assistant", "content": chat["answer"]}])[0]
            rows.append(whole)
            answers.append((len(prompt) - 1, len(whole) - 1))
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        at = torch.arange(longest)
        begin, end = torch.tensor(answers).T[..., None]
        return Prompts(tokens, (at >= begin) & (at < end))

    @torch.no_grad()
    def distributions(self, batch: Prompts, packed: bool = False) -> Tensor:
        """Log-probs [answer tokens, vocabulary]."""
        return self.logits(batch, packed).log_softmax(-1)

    def rewards(self, found: list[Tensor]) -> Tensor:
        """1 where every answer token is the most likely one, row by row."""
        scores = []
        for batch, log_probs in zip(self.batches, found, strict=True):
            targets = batch.tokens.roll(-1, 1)[batch.answer]
            right = torch.zeros_like(batch.answer, dtype=torch.float)
            right[batch.answer] = (log_probs.argmax(-1) != targets).float()
            scores.append((right.sum(1) == 0).float())
        return torch.cat(scores)

    def logits(self, batch: Prompts, packed: bool) -> Tensor:
        """[answer tokens, vocabulary]; packed: each row sees the one before it, as a pack without isolation would."""
        tokens = torch.cat([batch.tokens.roll(1, 0), batch.tokens], dim=1) if packed else batch.tokens
        logits = self.model(tokens, use_cache=False).logits
        return logits[:, tokens.size(1) - batch.tokens.size(1) :][batch.answer].float()

    def gradient_norm(self, packed: bool = False) -> float:
        """Norm of the policy gradient on the first batch: advantage 1 for the answers of even rows, -1 for those of odd ones."""
        self.model.zero_grad()
        batch = self.batches[0]
        losses = F.cross_entropy(self.logits(batch, packed), batch.tokens.roll(-1, 1)[batch.answer], reduction="none")
        row = batch.answer.nonzero()[:, 0]
        sign = 1.0 - 2.0 * (row % 2)
        (losses * sign).mean().backward()
        squares = [p.grad.float().square().sum() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()
        return float(torch.stack(squares).sum().sqrt())

    def effect(self, fault: Fault) -> Seen | None:
        """What the fault does."""
        try:
            with _plant(self.model, fault):
                packed = fault is Fault.ATTENTION_LEAKS_DOCUMENTS
                faulty = [self.distributions(batch, packed) for batch in self.batches]
                norm = self.gradient_norm(packed)
        except ValueError:
            return None
        kl = torch.cat([(c.exp() * (c - f)).sum(-1) for c, f in zip(self.clean, faulty, strict=True)]).mean()
        change = (self.rewards(faulty) - self.clean_reward).double()
        if packed:
            change = torch.zeros_like(change)
        return Seen(float(kl), norm / self.clean_norm, float(change.mean()), float(change.std() / math.sqrt(len(change))), self.noise)

    def bf16_kl(self) -> float:
        """KL of the same model in bf16: what other kernels may give."""
        model = self.model
        self.model = load_model(inspect_directory(Path(model.name_or_path)), dtype=torch.bfloat16)
        try:
            found = [self.distributions(batch) for batch in self.batches]
        finally:
            self.model = model
        return float(torch.cat([(c.exp() * (c - f)).sum(-1) for c, f in zip(self.clean, found, strict=True)]).mean())


@contextlib.contextmanager
def _plant(model: torch.nn.Module, fault: Fault) -> Iterator[None]:
    if fault is Fault.ATTENTION_LEAKS_DOCUMENTS:  # `distributions` lays the rows end to end
        yield
    elif fault is Fault.STALE_TOPK_RECOMPUTE:
        with contextlib.ExitStack() as stack:
            for layer in model.base_model.layers:
                if hasattr(layer.self_attn, "index_selector"):
                    _recompute_with_stale_keys(stack, layer)
            yield
    else:
        with planted(model, fault):
            yield


def _recompute_with_stale_keys(stack: contextlib.ExitStack, layer: torch.nn.Module) -> None:
    """Run the attention again in the backward pass, where every query takes the keys of the one before it, too.

    The attention alone: with the experts in it, other keys send tokens to other experts, and torch notices other shapes.
    """
    from megatron_patch.hf_model.modeling_deepseek_v2_dsa import select_topk

    attention, state = layer.self_attn, {"again": False}
    forward = attention.forward

    def select(scores: Tensor, k: int) -> Tensor:
        chosen = select_topk(scores, k)
        return chosen.roll(1, 1) | torch.eye(chosen.size(1), chosen.size(2), dtype=torch.bool) if state["again"] else chosen

    def recomputed(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)

        @contextlib.contextmanager
        def second():
            state["again"] = True
            try:
                yield
            finally:  # torch leaves early, once it has what it needs
                state["again"] = False

        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), second()), **kwargs
        )

    shadow(stack, attention, "forward", recomputed)
    shadow(stack, attention, "index_selector", select)


def main(arguments: Arguments) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    subjects = {"proxy": Subject(arguments.proxy, arguments.rows), "twin": Subject(arguments.twin, arguments.rows)}
    for name, subject in subjects.items():
        size = sum(p.numel() for p in subject.model.parameters())
        print(f"{name}: {size / 1e6:.2f}M parameters, {len(subject.model.base_model.layers)} layers, exact match {subject.clean_reward.mean():.3f}, "
              f"KL of bf16 {subject.noise:.1e}", flush=True)  # fmt: skip
    found = {}
    for fault in tqdm(sorted({*PLANTS, Fault.STALE_TOPK_RECOMPUTE, Fault.ATTENTION_LEAKS_DOCUMENTS}), unit="fault"):
        found[fault.value] = {name: subject.effect(fault) for name, subject in subjects.items()}
    print_table(found)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(entries(found, arguments.rows), indent=2) + "\n")


def entries(found: dict[str, dict[str, Seen | None]], rows: int) -> list[dict]:
    """As every benchmark writes them; `ours` is the proxy, `theirs` the larger model, null where it cannot have the fault."""
    units = {"kl": "nats/token", "grad_ratio": "ratio of norms", "reward_change": "exact match"}
    return [
        {
            "name": f"fault_sensitivity/{measure}/{fault}",
            "unit": unit,
            "ours": row["proxy"] and asdict(row["proxy"])[measure],
            "theirs": row["twin"] and asdict(row["twin"])[measure],
            "ratio": None,
            "goal": None,
            "repeats": rows,
            "spread": None,
            "versions": {"torch": torch.__version__},
        }
        for fault, row in found.items()
        for measure, unit in units.items()
    ]


def print_table(found: dict[str, dict[str, Seen | None]]) -> None:
    """Markdown."""
    print("\n| fault | " + " | ".join(f"{m}: KL | grad | reward" for m in ("proxy", "twin")) + " | seen in both |")
    print("|---|" + "---:|" * 6 + "---|")
    for fault, row in found.items():
        cells = [_cells(row[name]) for name in ("proxy", "twin")]
        seen = [each.seen for each in row.values() if each is not None]
        verdict = "cannot have it" if not seen else ("yes" if all(seen) else ("no: in neither" if not any(seen) else "NO: in one"))
        print(f"| {fault} | {' | '.join(cells)} | {verdict} |")


def _cells(seen: Seen | None) -> str:
    if seen is None:
        return "- | - | -"
    return f"{seen.kl:.1e} | {seen.grad_ratio:.3f} | {seen.reward_change:+.3f}"


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
