"""Speed of `data/prepare_pretrain.py` against a bare loop over `tokenizers`' encode_batch, which checks and writes nothing.

    python benchmarks/data_prep.py --megabytes 60 --workers 2 --repeats 3 [--folder DIR] [--json FILE]

Documents of about 4,000 characters from the embedded texts (with a number in each, so that no two are equal), and a byte-level BPE
tokenizer of 16,000 words trained on them. Each side runs in a fresh process; the start (imports, loading the tokenizer) is measured on a
file of one row and taken off, because a real corpus takes hours. The bare loop decodes each JSON line and encodes 1,000 documents a
call: once with as many threads as ours has workers, once with one.
"""

import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import sides
import tyro

GOAL = 0.9
CHARACTERS, VOCABULARY = 4000, 16000
BARE = """
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[2])
batch, tokens = [], 0
def encode():
    return sum(len(e.ids) for e in tokenizer.encode_batch(batch, add_special_tokens=False))
for line in open(sys.argv[1], encoding="utf-8"):
    batch.append(json.loads(line)["text"])
    if len(batch) == 1000:
        tokens += encode()
        batch.clear()
print("TOKENS", tokens + encode())
"""


@dataclass
class Arguments:
    megabytes: float = 60.0
    """Size of the text, in 1e6 bytes."""
    workers: int = 2
    repeats: int = 3
    folder: Path | None = None
    """Where to work; default: a temporary folder."""
    json: Path | None = None
    """Also write the figures here."""


def build(folder: Path, megabytes: float) -> tuple[Path, Path]:
    """(the text, a file with one row of it); trains the tokenizer into the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    whole = "\n".join(file.read_text(encoding="utf-8") for file in sorted((sides.ROOT / "megatron_patch/demo/text").glob("*.txt")))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<bos>", "<eos>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([whole], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1], pad_token=special[2])
    fast.save_pretrained(folder)
    text, row = folder / "text.jsonl", folder / "row.jsonl"
    written, number = 0, 0
    with text.open("w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            start = number * CHARACTERS % (len(whole) - CHARACTERS)
            written += file.write(json.dumps({"text": f"{number} {whole[start : start + CHARACTERS]}"}, ensure_ascii=False) + "\n")
            number += 1
    row.write_text('{"text": "one"}\n', encoding="utf-8")
    return text, row


def ours(folder: Path, text: Path, workers: int) -> tuple[float, int]:
    """(seconds, tokens without BOS and EOS)."""
    prefix = Path(tempfile.mkdtemp(dir=folder)) / "P"
    command = [sys.executable, str(sides.ROOT / "data/prepare_pretrain.py"), "--input", str(text), "--tokenizer", str(folder)]
    seconds, _, _ = sides.timed([*command, "--output-prefix", str(prefix), "--workers", str(workers)])
    report = json.loads(Path(f"{prefix}.json").read_text())
    return seconds, report["tokens"] - 2 * report["documents"]


def bare(folder: Path, text: Path, threads: int) -> tuple[float, int]:
    os.environ |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false"}
    seconds, _, printed = sides.timed([sys.executable, "-c", BARE, str(text), str(folder / "tokenizer.json")])
    return seconds, int(printed.split("TOKENS")[1])


def main(arguments: Arguments) -> None:
    folder = Path(tempfile.mkdtemp(prefix="data_prep_", dir=arguments.folder))
    text, row = build(folder, arguments.megabytes)
    forms = {"ours": (ours, arguments.workers), "bare": (bare, arguments.workers), "bare, one thread": (bare, 1)}
    starts = {name: min(form(folder, row, n)[0] for _ in range(2)) for name, (form, n) in forms.items()}
    seconds, tokens = {name: [] for name in forms}, set()
    for _ in range(arguments.repeats):
        for name, (form, n) in forms.items():
            took, found = form(folder, text, n)
            seconds[name].append(took - starts[name])
            tokens.add(found)
    if len(tokens) != 1:
        raise SystemExit(f"error: the sides must find the same tokens: {tokens}")
    count = tokens.pop()
    for name, took in seconds.items():
        best = statistics.median(took)
        print(f"{name}: {best:.2f} s and a start of {starts[name]:.2f} s, {count / best / 1e6:.2f}M tokens/s")
    size, best = f"megabytes={arguments.megabytes:g}/workers={arguments.workers}", statistics.median(seconds["ours"])
    spread = (max(seconds["ours"]) - min(seconds["ours"])) / best
    rows = [
        sides.entry(f"data_prep/{name.replace(', ', '_').replace(' ', '_')}/{size}", "s", best, statistics.median(seconds[name]),
                    goal=goal, repeats=arguments.repeats, spread=spread)
        for name, goal in (("bare", GOAL), ("bare, one thread", None))
    ]  # fmt: skip
    sides.publish(rows, arguments.json)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
