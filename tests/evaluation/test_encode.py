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
    long, short = encode_documents(tokenizer, HeldOut(["abcdef", " a"], 4))
    plain = tokenizer("abcdef", add_special_tokens=False)["input_ids"]
    assert (long.ids, long.start) == ([tokenizer.bos_token_id, *plain[:3]], 1)
    assert (long.context, long.continuation) == ("<bos>", "abc")
    assert short.continuation == " a"


def test_a_document_is_cut_where_its_text_reads_the_same(tmp_path):
    """Inside a character there is no text, and lm-eval takes text."""
    (document,) = encode_documents(
        _tokenizer(tmp_path), HeldOut(["ab\N{SNOWMAN}cdef"], 5)
    )  # its three bytes are tokens 3 to 5
    assert document.continuation == "ab" and len(document.ids) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a<eos>b", "document 2 .* becomes other tokens"),  # lm-eval would score a control token
        ("\ud800", "document 2 has a lone surrogate"),
        ("<bos>", "document 2 .* becomes other tokens"),
    ],
)
def test_refuses_a_document_that_lm_eval_would_read_otherwise(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        encode_documents(_tokenizer(tmp_path), HeldOut(["fine", text], 48))


def test_a_template_without_bos_gets_it_once(tmp_path):
    tokenizer = _tokenizer(tmp_path, CHAT_TEMPLATE.removeprefix("{{ bos_token }}"))
    (example,) = encode_rows(tokenizer, [Row(QUESTION, "2", "f:1")])
    assert example.context.startswith("<bos>User: one") and example.ids.count(tokenizer.bos_token_id) == 1


def test_a_tokenizer_that_adds_bos_itself_adds_no_second(tmp_path):
    """As DeepSeek-V2's does: lm-eval asks it to add special tokens unless the text begins with BOS."""
    from lm_eval.models.huggingface import HFLM
    from tokenizers import processors

    tokenizer = _tokenizer(tmp_path)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id
    reader = HFLM.__new__(HFLM)
    reader.tokenizer, reader.add_bos_token, reader.custom_prefix_token_id = tokenizer, None, None
    examples = [
        *encode_rows(tokenizer, [Row(QUESTION, "2", "f:1")]),
        *encode_documents(tokenizer, HeldOut(["ab cd"], 48)),
    ]
    for example in examples:
        context, continuation = reader._encode_pair(example.context, example.continuation)
        assert (context + continuation, len(context)) == (example.ids, example.start)


def test_refuses_a_prompt_that_ends_with_whitespace(tmp_path):
    """lm-eval counts it to the answer, so the model would have to write it a second time."""
    template = CHAT_TEMPLATE.replace("'Assistant: ' + m", "'Assistant:\n' + m").replace(
        "{{ 'Assistant:' }}", "{{ 'Assistant:\n' }}"
    )
    with pytest.raises(UserError, match="f:1: lm-eval must read a row as training did"):
        encode_rows(_tokenizer(tmp_path, template), [Row(QUESTION, "2", "f:1")])
