"""One tokenizer for all tests of the demo."""

import pytest

from megatron_patch.demo.corpus import load_corpus
from megatron_patch.demo.tasks import WHOLE_PIECES
from megatron_patch.demo.tokenizer import train_pieces, write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, train_pieces(load_corpus().base[:300], WHOLE_PIECES), WHOLE_PIECES)
    return AutoTokenizer.from_pretrained(directory)
