"""`dsa-upcycle parity run | dump | diff`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron_patch import flags

PROG = "dsa-upcycle parity"
SUMMARY = "trainer against checkpoint, module by module; names the known fault behind a difference"


@dataclass
class Run:
    """Run the same tokens through a training checkpoint and its export, and say whether they are one model.

    Writes parity.json, parity.md and parity.png: every module against an independent implementation on its own inputs,
    routes, selections, log-probs, weights, and which known fault explains a difference. Exit code 2 if they differ.

    Example: dsa-upcycle parity run --checkpoint runs/demo/sft --hf runs/demo/export --text book.txt --seq-length 512
    --output runs/demo/parity
    """

    checkpoint: Path
    """The --save directory of a training run."""
    hf: Path
    """The Hugging Face directory that was exported from it."""
    text: Path
    """A text file, or .jsonl."""
    seq_length: int
    """Tokens to read. Documents longer than top-k test the indexer."""
    output: Path
    """A new or empty directory."""
    documents: int = 1
    """Of about equal length, packed end to end: more than one also shows leaks between them."""
    text_key: str = "text"
    """Of .jsonl rows."""
    base: Path | None = None
    """Where the base is now; default: where it was in training."""
    iteration: int | None = None
    """Which checkpoint; default: the latest."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations on both sides."""
    device: Literal["cpu", "cuda", "npu"] | None = None
    """Default: what is there."""
    dsa_backend: str = "auto"
    """The trainer's DSA op."""
    json: Path | None = None
    """Also write parity.json to this file."""

    def __call__(self) -> int | None:
        from megatron_patch.diagnosis.parity import run

        return run.run(
            self.checkpoint,
            self.hf,
            run.Tokens(self.text, self.seq_length, self.documents, self.text_key),
            self.output,
            base=self.base,
            iteration=self.iteration,
            how=run.How(self.dtype, self.device, self.dsa_backend),
            json_file=self.json,
        )


@dataclass
class Dump:
    """Record one side, to compare it with the other side or another machine (parity diff).

    Example: dsa-upcycle parity dump --checkpoint runs/demo/sft --text book.txt --seq-length 512 --output runs/demo/dump_npu
    """

    output: Path
    """A new or empty directory."""
    checkpoint: Path | None = None
    """The --save directory of a training run. Either this or --hf."""
    hf: Path | None = None
    """A Hugging Face directory."""
    text: Path | None = None
    """A text file, or .jsonl. Either this or --tokens-of."""
    seq_length: int | None = None
    """Tokens to read of --text."""
    documents: int = 1
    """Of about equal length, packed end to end."""
    text_key: str = "text"
    """Of .jsonl rows."""
    tokens_of: Path | None = None
    """Another dump, or a rollout's .jsonl or .npz: take its tokens."""
    base: Path | None = None
    """Where the base is now; default: where it was in training."""
    iteration: int | None = None
    """Which checkpoint; default: the latest."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations."""
    device: Literal["cpu", "cuda", "npu"] | None = None
    """Default: what is there."""
    dsa_backend: str = "auto"
    """The trainer's DSA op."""

    def __call__(self) -> int | None:
        from megatron_patch.diagnosis.parity import run

        return run.dump(
            self.output,
            run.Tokens(self.text, self.seq_length, self.documents, self.text_key, self.tokens_of),
            checkpoint=self.checkpoint,
            hf=self.hf,
            base=self.base,
            iteration=self.iteration,
            how=run.How(self.dtype, self.device, self.dsa_backend),
        )


@dataclass
class Diff:
    """Compare two dumps, or a dump and what a rollout engine recorded (.jsonl or .npz with verl's names).

    With --hf every module is judged and known faults are looked for; without, the two are only compared.

    Example: dsa-upcycle parity diff runs/dump_npu runs/dump_cpu --hf runs/demo/export --output runs/npu_cpu
    """

    a: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="A")]]
    """A dump."""
    b: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="B")]]
    """Another, or a rollout's file."""
    output: Path
    """A new or empty directory."""
    hf: Path | None = None
    """The Hugging Face directory of the model: its weights judge both sides."""
    row: int = 0
    """Which sequence of a rollout's .jsonl."""
    json: Path | None = None
    """Also write parity.json to this file."""

    def __call__(self) -> int | None:
        from megatron_patch.diagnosis.parity import run

        return run.diff(self.a, self.b, self.output, hf=self.hf, row=self.row, json_file=self.json)


COMMANDS = {"run": Run, "dump": Dump, "diff": Diff}


def dispatch(argv: Sequence[str]) -> int | None:
    """See `flags.call_group`."""
    return flags.call_group(argv, COMMANDS, PROG)
