"""The texts: cut into documents, dealt out without overlap, the same way each time."""

from megatron_patch.demo.corpus import ADDED_BOOKS, BASE_BOOKS, documents, load_corpus, paragraphs, read_book


def test_parts_are_disjoint_and_complete():
    corpus = load_corpus()
    parts = [*corpus.base, *corpus.added, *corpus.held_out]
    everything = [text for name in (*BASE_BOOKS, *ADDED_BOOKS) for text in documents(read_book(name))]
    assert sorted(parts) == sorted(everything)
    assert not set(corpus.held_out) & (set(corpus.base) | set(corpus.added))
    assert not set(corpus.base) & set(corpus.added)
    assert len(corpus.held_out) >= 150


def test_held_out_comes_from_every_book():
    held_out = set(load_corpus().held_out)
    for name in (*BASE_BOOKS, *ADDED_BOOKS):
        assert held_out & set(documents(read_book(name))), name


def test_cutting_keeps_every_word_and_the_limit():
    book = read_book("persuasion")
    found = documents(book, 700)
    assert " ".join(found).split() == " ".join(paragraphs(book)).split()
    assert max(map(len, found)) <= 900  # one clause may pass the limit
    assert sum(len(text) > 300 for text in found) > 0.9 * len(found)


def test_headings_are_no_text():
    text = "\n".join(load_corpus().base)
    assert "Chapter " not in text and "CHAPTER" not in text and "Jane Austen" not in text


def test_the_split_depends_on_the_seed_alone():
    assert load_corpus(1) == load_corpus(1)
    assert load_corpus(1).held_out != load_corpus(2).held_out
