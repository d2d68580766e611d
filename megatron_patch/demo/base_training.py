"""Train the small base from scratch: plain PyTorch on transformers' model, half running text, half chat tasks."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from megatron_patch.demo.tasks import TASKS, Message, conversation

SMALLEST_SIZE = 0.2  # lists are drawn between this share of the suite's size and the whole: short ones are learned first


@dataclass(frozen=True)
class BaseTraining:
    """How the base is trained.

    Attributes:
        steps: optimizer steps.
        text_rows, chat_rows: rows of a step.
        length: tokens of a row.
        muon_rate, adam_rate: learning rates at their height, of attention and MLP matrices, and of everything else.
        weight_decay: of the matrices that Muon trains. Without it the residual stream grows until a new layer on top reads the
            tokens in it badly.
        decay_from: share of the steps after which the rates fall.
        balance: weight of the load-balancing loss, which keeps every routed expert in use.
    """

    steps: int
    text_rows: int = 2
    chat_rows: int = 6
    length: int = 208
    muon_rate: float = 5e-3
    adam_rate: float = 2e-3
    weight_decay: float = 0.2
    warmup_steps: int = 40
    decay_from: float = 0.5
    balance: float = 0.01
    seed: int = 1234

    def rate(self, step: int) -> float:
        """Factor of the learning rates: linear warm-up, constant until `decay_from`, then linear down to 2%."""
        done = step / self.steps
        fall = max(0.0, done - self.decay_from) / (1 - self.decay_from)
        return min(1.0, (step + 1) / self.warmup_steps) * (1.0 - 0.98 * fall)


def encode_conversation(tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Token ids of a chat and which of them the assistant says (end token included).

    Each message is encoded alone, which equals encoding the rendered chat: the template's words are pieces of their own.
    """
    ids, said = [tokenizer.bos_token_id], [False]
    for message in messages:
        if message["role"] == "user":
            new = tokenizer.encode(f"User: {message['content']}\n\nAssistant:", add_special_tokens=False)
        else:
            new = [*tokenizer.encode(f" {message['content']}", add_special_tokens=False), tokenizer.eos_token_id]
        ids += new
        said += [message["role"] == "assistant"] * len(new)
    return ids, said


def encode_documents(tokenizer, texts: Sequence[str]) -> Tensor:
    """All documents end to end, each between BOS and EOS. int64 [tokens]."""
    ids: list[int] = []
    for encoded in tokenizer(list(texts), add_special_tokens=False)["input_ids"]:
        ids += [tokenizer.bos_token_id, *encoded, tokenizer.eos_token_id]
    return torch.tensor(ids)


def batches(tokenizer, texts: Sequence[str], settings: BaseTraining) -> Iterator[tuple[Tensor, Tensor]]:
    """One (tokens int64 [rows, length + 1], counted bool [rows, length]) a step; the text rows come first."""
    rng = random.Random(settings.seed)
    stream = encode_documents(tokenizer, texts)
    tasks = [task for task in TASKS if task.taught_to_base]
    width = settings.length + 1
    for _ in range(settings.steps):
        starts = [rng.randrange(len(stream) - width) for _ in range(settings.text_rows)]
        rows = [stream[start : start + width].tolist() for start in starts]
        counted = [[True] * width for _ in rows]
        for _ in range(settings.chat_rows):
            ids: list[int] = []
            said: list[bool] = []
            while len(ids) < width:  # fill the row; what does not fit is cut
                task = rng.choices(tasks, [task.base_weight for task in tasks])[0]
                chat = conversation(task, rng, texts, rng.uniform(SMALLEST_SIZE, 1.0))
                new_ids, new_said = encode_conversation(tokenizer, chat)
                ids += new_ids
                said += new_said
            rows.append(ids[:width])
            counted.append(said[:width])
        yield torch.tensor(rows), torch.tensor(counted)[:, 1:]


class RouterLoad:
    """Collects what the routers choose in a forward pass and turns it into the load-balancing loss.

    Source: Switch Transformers (arXiv 2101.03961), equation 4, averaged over the layers; 1.0 is perfect balance.
    """

    def __init__(self, model: nn.Module):
        self.seen: list[tuple[Tensor, Tensor]] = []
        routers = [module for module in model.modules() if type(module).__name__ == "DeepseekV2TopkRouter"]
        self._handles = [router.register_forward_hook(self._collect) for router in routers]

    def _collect(self, router: nn.Module, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if router.training:
            self.seen.append((output[0], output[2]))  # logits [tokens, E], chosen experts [tokens, k]

    def loss(self) -> Tensor:
        """Scalar; forgets what was collected."""
        terms = []
        for logits, chosen in self.seen:
            experts = logits.shape[-1]
            share = F.one_hot(chosen, experts).float().sum(1).mean(0) / chosen.shape[-1]
            terms.append(experts * (share * logits.softmax(-1).mean(0)).sum())
        self.seen = []
        return torch.stack(terms).mean()

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()


def optimizers(model: nn.Module, settings: BaseTraining) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of attention and MLPs, AdamW for embeddings, head, routers, norms and stacked experts.

    Source: Muon (Jordan et al., 2024), PyTorch's.
    """
    others = ("embed_tokens", "lm_head", "mlp.gate.weight")
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and not any(part in name for part in others)]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    return [
        torch.optim.Muon(matrices, lr=settings.muon_rate, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=settings.adam_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True),
    ]


def train_base(model: nn.Module, tokenizer, texts: Sequence[str], settings: BaseTraining) -> dict[str, float]:
    """Train `model` in place. Returns the last text and chat losses (nats per counted token, running means)."""
    load = RouterLoad(model)
    used = optimizers(model, settings)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, settings.rate) for optimizer in used]
    means: dict[str, float] = {}
    model.train()
    bar = tqdm(
        batches(tokenizer, texts, settings), total=settings.steps, desc="train base", unit="step", mininterval=1.0
    )
    for tokens, counted in bar:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")  # [rows, length]
        text_loss = losses[: settings.text_rows].mean()
        said = counted[settings.text_rows :]
        chat_loss = (losses[settings.text_rows :] * said).sum() / said.sum().clamp_min(1)  # short rows may hold no answer
        (text_loss + chat_loss + settings.balance * load.loss()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(used, schedules):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        for name, loss in (("text_loss", text_loss.item()), ("chat_loss", chat_loss.item())):
            means[name] = 0.95 * means.get(name, loss) + 0.05 * loss
        bar.set_postfix(text=f"{means['text_loss']:.3f}", chat=f"{means['chat_loss']:.3f}", refresh=False)
    load.close()
    model.eval()
    return means
