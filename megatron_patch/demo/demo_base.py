"""`dsa-upcycle demo-base`: the embedded default base, from text in the package to a Hugging Face directory."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from megatron_patch.demo.base_model import build_model, initialize, published_config, write_base
from megatron_patch.demo.base_training import BaseTraining, encode_conversation, train_base
from megatron_patch.demo.corpus import load_corpus
from megatron_patch.demo.demo_data import write_demo_data
from megatron_patch.demo.tasks import TASKS, WHOLE_PIECES, suite_row
from megatron_patch.demo.tokenizer import BOS_ID, EOS_ID, VOCABULARY_SIZE, train_pieces, write_tokenizer
from megatron_patch.io.publish import atomic_directory

FULL = BaseTraining(steps=800)
FAST = BaseTraining(steps=20, text_rows=2, chat_rows=2)
CONVERSATIONS = 6000
SCORED_ROWS = 100  # per task, for the table at the end; the suite holds more
FAST_ROWS = 20
BATCH = 20  # rows of one scoring forward


def run(
    output: Path,
    fast: bool = False,
    seed: int = 1234,
    training: BaseTraining | None = None,
    specialised_experts: bool = False,
) -> None:
    """Train the base and write it, its tokenizer and `demo_data/` to `output`, all or nothing.

    Args:
        output: a new or empty directory.
        fast: some seconds of training: every file is right, the model knows little.
        specialised_experts: routers are not balanced and one expert is shared, so that experts take tasks of their own,
            as those of large models do and as pruning needs it. Upcycling learns the needle worse on such a base.
        seed: fixes text split, tasks, initial weights and batches.
        training: other training settings than the built-in ones.

    Raises:
        UserError: `output` is not empty.
    """
    from transformers import AutoTokenizer

    started = time.monotonic()
    settings = training or (FAST if fast else FULL)
    with atomic_directory(output) as directory:
        corpus = load_corpus(seed)
        pieces = train_pieces(corpus.base, WHOLE_PIECES)
        write_tokenizer(directory, pieces, WHOLE_PIECES)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        (directory / "demo_data").mkdir()
        write_demo_data(directory / "demo_data", corpus, conversations=CONVERSATIONS, seed=seed)

        config = published_config(VOCABULARY_SIZE, BOS_ID, EOS_ID)
        if specialised_experts:
            config["n_shared_experts"], settings = 1, replace(settings, balance=0.0)
        model = build_model(config)
        initialize(model, seed)
        losses = train_base(model, tokenizer, corpus.base, settings)
        held_out = text_loss(model, tokenizer, corpus.held_out[:FAST_ROWS] if fast else corpus.held_out)
        scores = task_scores(model, tokenizer, corpus.held_out, seed, FAST_ROWS if fast else SCORED_ROWS)
        write_base(directory, model, config)
    _report(output, losses, held_out, scores, time.monotonic() - started)


@torch.no_grad()
def text_loss(model: nn.Module, tokenizer, texts: Sequence[str], length: int = 256) -> float:
    """Mean loss in nats per token over documents cut to `length` tokens (BOS and EOS included)."""
    total = count = 0.0
    documents = [
        [tokenizer.bos_token_id, *tokenizer.encode(t, add_special_tokens=False), tokenizer.eos_token_id] for t in texts
    ]
    for start in range(0, len(documents), BATCH):
        tokens, present = _pad([ids[:length] for ids in documents[start : start + BATCH]])
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")[present[:, 1:]]
        total += losses.sum().item()
        count += losses.numel()
    return total / count


@torch.no_grad()
def task_scores(
    model: nn.Module, tokenizer, passages: Sequence[str], seed: int, rows: int = SCORED_ROWS
) -> dict[str, float]:
    """Share of suite instances per task whose whole answer, end token included, is the arg-max after the right prefix."""
    scores = {}
    for task in TASKS:
        rng = random.Random(seed)
        exact = 0
        for _ in range(rows // BATCH):
            chats = [suite_row(task, rng, passages) for _ in range(BATCH)]
            prompts = [encode_conversation(tokenizer, chat["messages"])[0] for chat in chats]
            whole = [
                encode_conversation(tokenizer, [*chat["messages"], {"role": "assistant", "content": chat["answer"]}])[0]
                for chat in chats
            ]
            tokens, _ = _pad(whole)
            guesses = model(input_ids=tokens[:, :-1], use_cache=False).logits.argmax(-1)
            for row, (prompt, ids) in enumerate(zip(prompts, whole)):
                span = slice(len(prompt) - 1, len(ids) - 1)
                exact += int(guesses[row, span].tolist() == ids[len(prompt) :])
        scores[task.name] = exact / (rows // BATCH * BATCH)
    return scores


def _pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(tokens int64 [rows, longest], present bool of the same shape); zeros on the right, which causality hides."""
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    present = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in rows])
    return tokens, present


def _report(output: Path, losses: dict[str, float], held_out: float, scores: dict[str, float], seconds: float) -> None:
    table = Table(title=f"base in {output} ({seconds:.0f} s)")
    for column in ("what", "value", "chance"):
        table.add_column(column, justify="left" if column == "what" else "right")
    table.add_row("text loss, training (nats/token)", f"{losses['text_loss']:.3f}", "")
    table.add_row("text loss, held out (nats/token)", f"{held_out:.3f}", "")
    for task in TASKS:
        note = "" if task.taught_to_base else " (never taught)"
        table.add_row(task.name + note, f"{scores[task.name]:.2f}", f"{task.chance:.2f}")
    Console().print(table)
