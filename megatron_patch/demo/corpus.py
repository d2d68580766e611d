"""Public-domain text cut into documents and dealt out: what the base reads, what upcycling adds, what nobody trains on."""

import random
import re
from dataclasses import dataclass
from importlib import resources

BASE_BOOKS = ("northanger_abbey", "persuasion")
ADDED_BOOKS = ("pride_and_prejudice",)  # the base never reads it: continued training has something to learn
DOCUMENT_CHARACTERS = 700  # some 230 tokens of the demo's tokenizer: one document fits a sequence of 256
HELD_OUT_FRACTION = 0.06
_HEADING = re.compile(r"^(chapter|volume|by$|jane austen|finis|\(18|\*)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+|(?<=[.!?;]\")\s+")


@dataclass(frozen=True)
class Corpus:
    """Documents by use. The three lists are disjoint, and no paragraph is in two documents."""

    base: list[str]  # the base trains on these
    added: list[str]  # upcycle pretraining trains on these and on `base`
    held_out: list[str]  # drawn from all books; only ever scored


def read_book(name: str) -> str:
    """The text of one book that the package carries (`text/<name>.txt`)."""
    return (resources.files(__package__) / "text" / f"{name}.txt").read_text(encoding="utf-8")


def paragraphs(book: str) -> list[str]:
    """Paragraphs of a book, each on one line; titles and chapter headings left out."""
    blocks = (" ".join(block.split()) for block in re.split(r"\n\s*\n", book))
    return [block for block in blocks if block and not _HEADING.match(block) and not block.isupper()]


def documents(book: str, size: int = DOCUMENT_CHARACTERS) -> list[str]:
    """Consecutive paragraphs joined by newlines into documents of at most `size` characters.

    A paragraph longer than that is cut at the ends of sentences or clauses; a single clause may exceed `size`.
    """
    pieces: list[tuple[str, str]] = []  # (separator in front, text)
    for paragraph in paragraphs(book):
        parts = _SENTENCE_END.split(paragraph) if len(paragraph) > size else [paragraph]
        pieces += [("\n" if i == 0 else " ", part) for i, part in enumerate(parts) if part]
    found: list[str] = []
    for separator, text in pieces:
        if found and len(found[-1]) + len(separator) + len(text) <= size:
            found[-1] += separator + text
        else:
            found.append(text)
    return found


def load_corpus(seed: int = 1234) -> Corpus:
    """All documents of the carried books, dealt out at random but reproducibly for `seed`."""
    shuffled = random.Random(seed)
    base, added, held_out = [], [], []
    for name in (*BASE_BOOKS, *ADDED_BOOKS):
        found = documents(read_book(name))
        shuffled.shuffle(found)
        held = round(len(found) * HELD_OUT_FRACTION)
        held_out += found[:held]
        (base if name in BASE_BOOKS else added).extend(found[held:])
    for part in (base, added, held_out):
        shuffled.shuffle(part)
    return Corpus(base, added, held_out)
