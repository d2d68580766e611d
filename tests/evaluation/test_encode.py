"""What is scored is what training supervised: the answer's tokens and the end token, right after the prompt."""

import pytest

from megatron_patch.data.tokenizer import load_tokenizer
from megatron_patch.errors import UserError
from megatron_patch.evaluation.encode import encode_documents, encode_rows
from megatron_patch.evaluation.suite import HeldOut, Row
from tests.tiny import CHAT_TEMPLATE, make_tiny_tokenizer

QUESTION = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two"},
]
MARKED = CHAT_TEMPLATE.replace(
    "'Assistant: ' + m['content'] + eos_token }}",
    "'Assistant: ' }}{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}",
)


def _tokenizer(tmp_path, template=CHAT_TEMPLATE):
    return load_tokenizer(make_tiny_tokenizer(tmp_path / "tokenizer", template))


def test_predicts_the_last_answer_and_eos_only(tmp_path):
    tokenizer = _tokenizer(tmp_path)
    (example,) = encode_rows(tokenizer, [Row(QUESTION, "2", "f:1")])
    prompt, answer = example.ids[: example.start], example.ids[example.start :]
    assert tokenizer.decode(prompt) == "<bos>User: one\n\nAssistant: 1<eos>User: two\n\nAssistant:"
    assert answer == [*tokenizer(" 2", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert example.ids.count(tokenizer.bos_token_id) == 1


def test_refuses_a_prompt_that_is_not_what_stands_before_an_answer(tmp_path):
    """With the markers after the space, the space is neither prompt nor answer: greedy decoding would have to write it."""
    tokenizer = _tokenizer(tmp_path, MARKED)
    with pytest.raises(UserError, match="f:1: the answer must begin where the chat template's generation prompt ends"):
        encode_rows(tokenizer, [Row(QUESTION, "2", "f:1")])


def test_refuses_control_tokens_in_a_row(tmp_path):
    with pytest.raises(UserError, match="f:1: the row cannot be scored: a special token"):
        encode_rows(_tokenizer(tmp_path), [Row(QUESTION, "2<eos>3", "f:1")])


def test_documents_have_bos_first_and_are_cut(tmp_path):
    tokenizer = _tokenizer(tmp_path)
    long, short = encode_documents(tokenizer, HeldOut(["abcdef", "a<eos>"], 4))
    plain = tokenizer("abcdef", add_special_tokens=False)["input_ids"]
    assert (long.ids, long.start) == ([tokenizer.bos_token_id, *plain[:3]], 1)
    assert tokenizer.eos_token_id not in short.ids  # text is text
