"""What the model will see, made visible: tokens, document boundaries, and which tokens are learned."""

import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import tyro

from megatron_patch.data.batch_file import read_batches
from megatron_patch.data.sft_corpus import META
from megatron_patch.data.sft_dataset import SftDataset
from megatron_patch.data.token_files import check_files, read_report
from megatron_patch.data.tokenizer import load_tokenizer, tokenizer_sha256
from megatron_patch.errors import UserError

GREEN, GREY, RESET = "\033[1;32m", "\033[2m", "\033[0m"


@dataclass
class ShowSettings:
    """Show prepared samples as the model sees them."""

    path: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PATH")]
    """A folder of prepare_sft.py, a prefix of prepare_pretrain.py, or a file of a run's non_finite folder."""
    n: int = 3
    """How many samples (SFT), rows (pretraining) or micro-batches."""
    seq_length: int = 256
    """Tokens in a row of pretraining text."""
    tokenizer: str | None = None
    """Directory of the tokenizer; by default where the data say it was."""
    trust_remote_code: bool = False
    """Let Python code in the tokenizer's directory run."""

    def __post_init__(self) -> None:
        for name in ("n", "seq_length"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be positive: {getattr(self, name)}; give 1 or more")


def show_samples(settings: ShowSettings, out: TextIO | None = None) -> None:
    """Print the first samples or rows, to stdout where `out` is None.

    Raises:
        UserError: nothing prepared at the path, or a tokenizer other than the one that made the data.
    """
    out = out or sys.stdout
    colour = out.isatty() and not os.environ.get("NO_COLOR")
    if (Path(settings.path) / META).is_file():
        _show_sft(settings, colour, out)
    elif Path(f"{settings.path}.json").is_file():
        _show_pretraining(settings, colour, out)
    elif Path(settings.path).is_file():
        _show_batches(settings, colour, out)
    else:
        raise UserError(
            f"nothing prepared at {settings.path!r}: it is neither a folder with {META} nor a prefix P of P.bin, "
            "P.idx and P.json, nor a file of micro-batches; run data/prepare_sft.py or data/prepare_pretrain.py first"
        )


def _show_sft(settings: ShowSettings, colour: bool, out: TextIO) -> None:
    dataset = SftDataset(settings.path, seq_length=sys.maxsize)
    tokenizer = _tokenizer(settings, dataset.meta)
    key = "green: learned" if colour else "[[...]]: learned"
    print(f"{len(dataset)} samples; | between tokens; {key}", file=out)
    for number in range(min(settings.n, len(dataset))):
        ids, mask = dataset.sample(number)
        print(f"\n== sample {number + 1}: {len(ids)} tokens, {int(mask.sum())} learned", file=out)
        print(render_tokens(token_texts(tokenizer, ids.tolist()), mask.tolist(), colour), file=out)


def _show_pretraining(settings: ShowSettings, colour: bool, out: TextIO) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    report = read_report(settings.path)
    check_files(settings.path, report)
    tokenizer = _tokenizer(settings, report)
    data = IndexedDataset(settings.path)
    print(f"{len(data)} documents, in file order (training shuffles them); | between tokens", file=out)
    document, rest = 0, []
    for row in range(settings.n):
        parts, space = [], settings.seq_length
        while space and (rest or document < len(data)):
            if not rest:
                rest = data[document].tolist()
                document += 1
            parts.append((document, rest[:space]))
            rest, space = rest[len(parts[-1][1]) :], space - len(parts[-1][1])
        if not parts:
            break
        print(f"\n== row {row + 1}: {settings.seq_length - space} tokens of {len(parts)} documents", file=out)
        for number, ids in parts:
            print(f"-- document {number}, {len(ids)} tokens", file=out)
            print(render_tokens(token_texts(tokenizer, ids), [0] * len(ids), colour), file=out)


def _show_batches(settings: ShowSettings, colour: bool, out: TextIO) -> None:
    kept, meta = read_batches(Path(settings.path))
    tokenizer = _tokenizer(settings, meta)
    key = "green: learned" if colour else "[[...]]: learned"
    print(f"{meta['kind']}, iteration {meta['iteration']}, rank {meta['rank']}: {len(kept)} micro-batches; | between tokens; {key}", file=out)
    for number, each in enumerate(kept[: settings.n], 1):
        batch, mask = each.batch, each.batch.loss_mask
        strange = int((~mask.isfinite()).sum())
        print(
            f"\n== micro-batch {number}: {len(batch.tokens)} tokens, {int((mask != 0).sum())} learned, loss {each.loss:g}; samples "
            f"{each.positions[0]} to {each.positions[-1]} of the run, {', '.join(map(str, each.rows))} of the data, from 0"
            + (f"; {strange} entries of the loss mask are not finite" if strange else ""),
            file=out,
        )
        ends = batch.cu_seqlens.tolist()
        for document, (begin, end) in enumerate(itertools.pairwise(ends), 1):
            # The mask stands beside the token before the learned one; the last label is of no token here.
            ids, learned = batch.tokens[begin:end].tolist(), [0.0, *mask[begin:end].tolist()]
            ids += batch.labels[end - 1 : end].tolist()
            if not learned[-1]:
                ids, learned = ids[:-1], learned[:-1]
            print(f"-- document {document}, {end - begin} tokens", file=out)
            print(render_tokens(token_texts(tokenizer, ids), learned, colour), file=out)


def _tokenizer(settings: ShowSettings, meta: dict[str, Any]) -> Any:
    path = settings.tokenizer or meta["tokenizer"]
    tokenizer = load_tokenizer(path, trust_remote_code=settings.trust_remote_code)
    if tokenizer_sha256(tokenizer) != meta["tokenizer_sha256"]:
        raise UserError(
            f"the tokenizer in {path!r} is not the one that made these data; give that one with --tokenizer"
        )
    return tokenizer


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token; a character split over several tokens is shown at the last of them ("" before)."""
    texts, pending = [], []
    for number in ids:
        pending.append(number)
        text = tokenizer.decode(pending, skip_special_tokens=False)
        if text.endswith("\ufffd") and len(pending) < 4:  # UTF-8 needs four bytes at most
            texts.append("")
            continue
        texts.append(text)
        pending = []
    if pending:
        texts[-1] = tokenizer.decode(pending, skip_special_tokens=False)
    return texts


def render_tokens(texts: Sequence[str], mask: Sequence[int], colour: bool) -> str:
    """Tokens with | between them; learned ones green, or in [[ ]] without colour.

    Control characters are escaped: text from a corpus must not drive the terminal.
    """
    pieces, learned = [], 0
    for text, is_learned in zip(texts, mask, strict=True):
        if learned and not is_learned:
            pieces.append(RESET if colour else "]]")
        if pieces:
            pieces.append(f"{GREY}|{RESET}{GREEN if is_learned and learned else ''}" if colour else "|")
        if is_learned and not learned:
            pieces.append(GREEN if colour else "[[")
        pieces.append("".join(c if c.isprintable() else repr(c)[1:-1] for c in text))
        learned = is_learned
    if learned:
        pieces.append(RESET if colour else "]]")
    return "".join(pieces)
