"""Train the small base from scratch: plain PyTorch on transformers' model, half running text, half chat tasks."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from megatron_patch.demo.tasks import TASKS, Message, conversation


@dataclass(frozen=True)
class BaseTraining:
    """How the base is trained.

    Attributes:
        steps: optimizer steps.
        text_rows, chat_rows: rows of a step; each row has `length` tokens.
        balance: weight of the load-balancing loss, which keeps every routed expert in use.
    """

    steps: int
    text_rows: int = 2
    chat_rows: int = 6
    length: int = 208
    learning_rate: float = 3e-3
    warmup_steps: int = 40
    balance: float = 0.01
    seed: int = 1234


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
    """Endless (tokens int64 [rows, length + 1], counted bool [rows, length]); the text rows come first."""
    rng = random.Random(settings.seed)
    stream = encode_documents(tokenizer, texts)
    tasks = [task for task in TASKS if task.taught_to_base]
    weights = [task.base_weight for task in tasks]
    width = settings.length + 1
    while True:
        starts = [rng.randrange(len(stream) - width) for _ in range(settings.text_rows)]
        rows = [stream[start : start + width].tolist() for start in starts]
        counted = [[True] * width for _ in rows]
        for _ in range(settings.chat_rows):
            ids: list[int] = []
            said: list[bool] = []
            while len(ids) < width:  # fill the row; what does not fit is cut
                task = rng.choices(tasks, weights)[0]
                new_ids, new_said = encode_conversation(tokenizer, conversation(task, rng, texts))
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


def train_base(model: nn.Module, tokenizer, texts: Sequence[str], settings: BaseTraining) -> dict[str, float]:
    """Train `model` in place with AdamW. Returns the last text and chat losses (nats a token, smoothed)."""
    load = RouterLoad(model)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(0.9, 0.99),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings))
    text = chat = float("nan")
    model.train()
    source = batches(tokenizer, texts, settings)
    with tqdm(total=settings.steps, desc="train base", unit="step") as bar:
        for step in range(settings.steps):
            tokens, counted = next(source)
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")  # [rows, length]
            text_loss = losses[: settings.text_rows].mean()
            chat_loss = losses[settings.text_rows :][counted[settings.text_rows :]].mean()
            (text_loss + chat_loss + settings.balance * load.loss()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            keep = 0.0 if step == 0 else 0.95
            text = (1 - keep) * text_loss.item() + (keep * text if keep else 0.0)
            chat = (1 - keep) * chat_loss.item() + (keep * chat if keep else 0.0)
            bar.update()
            bar.set_postfix(text=f"{text:.3f}", chat=f"{chat:.3f}", refresh=False)
    load.close()
    model.eval()
    return {"text_loss": text, "chat_loss": chat}


def _rate(step: int, settings: BaseTraining) -> float:
    """Factor of the learning rate: linear warm-up, constant for the first half, then linear down to 2%."""
    done = step / settings.steps
    return min(1.0, (step + 1) / settings.warmup_steps) * (1.0 if done < 0.5 else 0.02 + 0.98 * 2 * (1 - done))
