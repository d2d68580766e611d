"""Loading a tokenizer, recognising it again, and turning plain text into tokens that cannot contain control "
"tokens."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_patch.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer in a Hugging Face directory; never looks at a hub.

    Args:
        path: directory with the tokenizer's files (a model directory will do).
        trust_remote_code: allow Python code found in the directory to run.

    Raises:
        UserError: no tokenizer there, no BOS or EOS token, or a tokenizer that turns the EOS token's name in plain text
            into the EOS token itself.
    """
    directory = Path(path)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"a tokenizer is a directory with {' or '.join(TOKENIZER_FILES)}: {str(path)!r} has none; give the base "
            "model's directory"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # tokenizers raises a plain Exception for a damaged file
        raise UserError(
            f"cannot load the tokenizer in {str(path)!r}: {type(error).__name__}: {error}; fetch its files again, or "
            "pass --trust-remote-code if you trust the Python code in it"
        ) from error
    for name in ("bos_token", "eos_token"):
        if getattr(tokenizer, f"{name}_id") is None:
            raise UserError(
                f"the tokenizer needs a {name}: {str(path)!r} defines none; add it to tokenizer_config.json"
            )
    if tokenizer.bos_token_id == tokenizer.eos_token_id:
        raise UserError(
            f"BOS and EOS must differ, since documents are cut at EOS: both are {tokenizer.eos_token!r} in "
            f"{str(path)!r}; use the base model's tokenizer"
        )
    if tokenizer.eos_token_id in encode_plain(tokenizer, [f"a{tokenizer.eos_token}b"])[0]:
        raise UserError(
            f"plain text must not become control tokens: {str(path)!r} parses {tokenizer.eos_token!r} in text even "
            "with split_special_tokens; mark it as special in tokenizer.json"
        )
    return tokenizer


def encode_plain(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, without BOS or EOS; names of special tokens in the text are ordinary characters."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # A tokenizer in Python, or one whose own code may do more than its backend.
    if not hasattr(backend, "encode_batch_fast") or not type(tokenizer).__module__.startswith("transformers."):
        encoded = tokenizer(
            list(texts), add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
        )
        return encoded["input_ids"]
    # What transformers does, without the places of tokens in the text and its own copies: a quarter faster.
    backend.no_truncation()
    backend.no_padding()
    before, backend.encode_special_tokens = backend.encode_special_tokens, True
    try:
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
    finally:
        backend.encode_special_tokens = before


def vocabulary_size(tokenizer: "PreTrainedTokenizerBase") -> int:
    """One more than the largest id. `len(tokenizer)` counts ids, which is less where ids were left out."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_sha256(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Hash of what token ids mean: the vocabulary with added tokens, BOS and EOS.

    Not a hash of files, so that saving the same tokenizer again (which reorders and renames) does not change it.
    """
    vocabulary = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    meaning = {"vocabulary": vocabulary, "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()


def chat_template(tokenizer: "PreTrainedTokenizerBase") -> str:
    """The tokenizer's chat template.

    Raises:
        UserError: it has none.
    """
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        raise UserError(
            f"chat data need a chat template: the tokenizer in {tokenizer.name_or_path!r} has none; use the Chat "
            "model's directory, or put a chat_template.jinja there"
        ) from None


def template_sha256(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Hash of the chat template's text."""
    return hashlib.sha256(chat_template(tokenizer).encode()).hexdigest()
