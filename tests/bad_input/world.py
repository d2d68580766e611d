"""Sound inputs to spoil: each case gets copies of its own in a directory of its own."""

import json
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from megatron_patch.checkpoint.export import export
from tests.checkpoint.models import DSA
from tests.checkpoint.runs import write_indexers, write_run
from tests.data.files import chat, pretrain, sft, write_jsonl
from tests.tiny import make_tiny_base, make_tiny_tokenizer

WORDS = "the cat sat on a mat and saw one dog run by".split()
INDEXER = [
    "--index-topk", str(DSA.index_topk), "--index-n-heads", str(DSA.index_n_heads), "--index-head-dim",
    str(DSA.index_head_dim),
]  # fmt: skip


class Case(NamedTuple):
    """`build` spoils something and returns the command line; `message` is a pattern of the one line that must follow."""

    build: Callable[["World"], list[str]]
    message: str


@dataclass(frozen=True)
class Originals:
    """A base with tokenizer, prepared text and chats, a training run, its export and a suite; read only."""

    path: Path

    @classmethod
    def make(cls, path: Path) -> "Originals":
        base = make_tiny_tokenizer(make_tiny_base(path / "base"))
        (path / "text").mkdir()
        rng = random.Random(1)
        texts = [{"text": " ".join(rng.choices(WORDS, k=rng.randint(5, 30)))} for _ in range(40)]
        pretrain([write_jsonl(path / "text" / "in.jsonl", texts)], base, path / "text" / "P")
        chats = [{"messages": chat(f"say {w}", w)} for w in WORDS * 3]
        sft([write_jsonl(path / "chats.jsonl", chats)], base, path / "chats", seq_length=64)
        export(write_run(path / "save", base), base, path / "export", progress=False)
        export(path / "save", base, path / "native", layout="native", progress=False)
        write_indexers(path / "indexers", base)
        write_suite(path / "suite")
        return cls(path)


def write_suite(path: Path) -> None:
    path.mkdir()
    task = {"name": "say", "file": "say.jsonl", "metric": "exact_match", "chance": 0.1, "taught_to_base": True}
    held_out = {"file": "heldout.jsonl", "text_key": "text", "max_length": 32}
    (path / "suite.json").write_text(json.dumps({"schema": 1, "name": "t", "tasks": [task], "perplexity": held_out}))
    write_jsonl(path / "say.jsonl", [{"messages": chat("say cat"), "answer": "cat"}])
    write_jsonl(path / "heldout.jsonl", [{"text": "the cat sat"}])


@dataclass(frozen=True)
class World:
    """A case's directory. Paths are of copies that the case may spoil."""

    path: Path
    originals: Originals

    def copy(self, name: str) -> Path:
        """`base`, `text`, `chats`, `save`, `export` or `suite`."""
        if not (self.path / name).exists():
            shutil.copytree(self.originals.path / name, self.path / name)
        return self.path / name

    @property
    def base(self) -> Path:
        return self.copy("base")

    @property
    def prefix(self) -> Path:
        return self.copy("text") / "P"

    @property
    def iteration(self) -> Path:
        """The training checkpoint's directory."""
        return self.copy("save") / "iter_0000020"

    @property
    def out(self) -> Path:
        return self.path / "out"

    def file(self, name: str, content: bytes | str) -> Path:
        if name.startswith("base/"):
            self.copy("base")
        (self.path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return self.path / name

    # command lines

    def prepare_pretrain(self, *inputs: Path | str, flags: Iterable[str] = ()) -> list[str]:
        tokenizer = self.originals.path / "base" if not (self.path / "base").exists() else self.base
        return ["prepare_pretrain", "--input", *map(str, inputs), "--tokenizer", str(tokenizer),
                "--output-prefix", str(self.out / "P"), *flags]  # fmt: skip

    def prepare_sft(self, *inputs: Path | str, flags: Iterable[str] = ()) -> list[str]:
        tokenizer = self.originals.path / "base" if not (self.path / "base").exists() else self.base
        return ["prepare_sft", "--input", *map(str, inputs), "--tokenizer", str(tokenizer), "--seq-length", "64",
                "--output", str(self.out), *flags]  # fmt: skip

    def chats(self, *rows: Any, flags: Iterable[str] = ()) -> list[str]:
        """prepare_sft over these rows."""
        return self.prepare_sft(write_jsonl(self.path / "in.jsonl", rows), flags=flags)

    def train(self, *flags: str, kind: str = "pretrain", data: Path | str | None = None) -> list[str]:
        data = data or (self.prefix if kind == "pretrain" else self.copy("chats"))
        return [f"{kind}_upcycle", "--base-model", str(self.base), "--data-path", str(data), "--save", str(self.out),
                "--train-iters", "2", "--seq-length", "64", "--global-batch-size", "2", "--micro-batch-size", "2",
                "--split", "80,20", "--eval-interval", "0", "--device", "cpu", *INDEXER, *flags]  # fmt: skip

    def export(self, *flags: str) -> list[str]:
        return ["dsa-upcycle", "export", "--checkpoint", str(self.copy("save")), "--base", str(self.base),
                "--output", str(self.out), *flags]  # fmt: skip

    def check(self) -> list[str]:
        return ["dsa-upcycle", "check", str(self.copy("export")), "--base", str(self.base)]

    def evaluate(self, *flags: str) -> list[str]:
        return ["dsa-upcycle", "evaluate", "--base", str(self.base), "--model", str(self.copy("export")),
                "--suite", str(self.copy("suite")), "--output", str(self.out), "--device", "cpu", *flags]  # fmt: skip

    def evaluate_plan(self, plan: Path) -> list[str]:
        return ["dsa-upcycle", "evaluate", "--kind", "prune", "--base", str(self.base), "--plan", str(plan),
                "--suite", str(self.copy("suite")), "--output", str(self.out), "--device", "cpu"]  # fmt: skip

    def prune_plan(self, *flags: str) -> list[str]:
        """A plan that keeps all 8 experts, which needs no statistics."""
        return ["dsa-upcycle", "prune", "plan", "--model", str(self.base), "--keep", "8", "--output", str(self.out), *flags]


def edit_json(file: Path, change: Callable[[Any], Any]) -> None:
    """Rewrite a JSON file with what `change` made of its content (in place, or returned)."""
    content = json.loads(file.read_text())
    changed = change(content)
    file.write_text(json.dumps(content if changed is None else changed))


def edit_bytes(file: Path, change: Callable[[bytearray], Any]) -> None:
    content = bytearray(file.read_bytes())
    changed = change(content)
    file.write_bytes(content if changed is None else changed)


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """One file instead of the base's shards, with the tensors that `change` has edited."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(directory.glob("model*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (directory / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
