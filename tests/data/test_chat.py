"""Which tokens are learned. An error here trains the wrong thing without any other sign."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_patch.data import chat as chat_module
from megatron_patch.data.chat import ChatEncoder, EncodedChat, RowRejected
from megatron_patch.data.tokenizer import load_tokenizer
from megatron_patch.errors import UserError
from tests.data.files import chat
from tests.tiny import CHAT_TEMPLATE

ONE_TURN = chat("Hi", "Paris")
THREE_TURNS = chat("Hi", "Paris", "And?", "Rome is", "End", "no", system="Be brief")
MARKED = CHAT_TEMPLATE.replace(
    "{{ 'Assistant: ' + m['content'] + eos_token }}",
    "{{ 'Assistant:' }}{% generation %}{{ ' ' + m['content'] + eos_token }}{% endgeneration %}",
)
END_OUTSIDE = MARKED.replace(" + eos_token }}{% endgeneration %}", " }}{% endgeneration %}{{ eos_token }}")
EOL_INSIDE = MARKED.replace(" + eos_token }}{% endgeneration %}", " + eos_token + '\n' }}{% endgeneration %}")


@pytest.fixture(scope="module")
def tiny(tiny_tokenizer):
    return load_tokenizer(tiny_tokenizer)


@pytest.fixture(scope="module")
def deepseek(deepseek_tokenizer):
    return load_tokenizer(deepseek_tokenizer)


@pytest.fixture
def encode_with(tiny, monkeypatch):
    """Encode with the tiny tokenizer and another template."""

    def encode(template: str, messages: list[dict[str, str]] = THREE_TURNS) -> EncodedChat:
        monkeypatch.setattr(tiny, "chat_template", template)
        return ChatEncoder(tiny).encode(messages)

    return encode


def learned(encoded: EncodedChat) -> list[int]:
    assert len(encoded.input_ids) == len(encoded.loss_mask)
    assert set(encoded.loss_mask) <= {0, 1}
    return [token for token, mask in zip(encoded.input_ids, encoded.loss_mask, strict=True) if mask]


def tiny_ids(text: str) -> list[int]:
    """The byte-level tokenizer by hand: bytes in the order of their printable stand-ins, after three special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    order = sorted(ByteLevel.alphabet())
    stand_in = {" ": "Ġ", "\n": "Ċ"}
    return [3 + order.index(stand_in.get(letter, letter)) for letter in text]


def test_exact_tokens_of_one_turn_tiny(tiny):
    encoded = ChatEncoder(tiny).encode(ONE_TURN)
    assert learned(encoded) == [*tiny_ids(" Paris"), 2]
    assert encoded.input_ids == [1, *tiny_ids("User: Hi\n\nAssistant: Paris"), 2]
    assert encoded.loss_mask == [0] * (1 + len("User: Hi\n\nAssistant:")) + [1] * len(" Paris") + [1]


def test_exact_tokens_of_three_turns_tiny(tiny):
    encoded = ChatEncoder(tiny).encode(THREE_TURNS)
    assert learned(encoded) == [*tiny_ids(" Paris"), 2, *tiny_ids(" Rome is"), 2, *tiny_ids(" no"), 2]
    assert encoded.input_ids.count(1) == 1 and encoded.input_ids[0] == 1
    assert encoded.loss_mask[0] == 0


def test_exact_tokens_of_one_turn_deepseek(deepseek):
    encoded = ChatEncoder(deepseek).encode(ONE_TURN)
    #                            BOS     User  :   Hi     \\n   \\n   Assistant :  Paris  EOS
    assert encoded.input_ids == [100000, 5726, 25, 11598, 185, 185, 77398, 25, 8913, 100001]
    assert learned(encoded) == [8913, 100001]


def test_exact_tokens_of_three_turns_deepseek(deepseek):
    encoded = ChatEncoder(deepseek).encode(THREE_TURNS)
    #                           Paris  EOS     Rome   is   EOS     no   EOS
    assert learned(encoded) == [8913, 100001, 12520, 317, 100001, 642, 100001]
    assert encoded.input_ids.count(100000) == 1 and encoded.input_ids[0] == 100000


@pytest.mark.parametrize("template", [MARKED, END_OUTSIDE, EOL_INSIDE], ids=["end inside", "end behind", "eol inside"])
def test_markers_give_the_same_tokens_as_prefix_differences(encode_with, template):
    """The end token is learned wherever the template puts its markers, and nothing behind it is."""
    by_prefixes = learned(encode_with(CHAT_TEMPLATE))
    assert learned(encode_with(template)) == by_prefixes
    assert encode_with(template).loss_mask.count(1) == len(by_prefixes)


def test_bos_is_added_where_the_template_has_none(encode_with):
    with_bos = encode_with(CHAT_TEMPLATE)
    assert encode_with(CHAT_TEMPLATE.replace("{{ bos_token }}", "")) == with_bos


def test_end_token_before_a_line_break(encode_with):
    """ChatML's form: the line break behind the end token is the template's, not the assistant's."""
    template = CHAT_TEMPLATE.replace("m['content'] + eos_token }}", "m['content'] + eos_token + '\n' }}")
    encoded = encode_with(template)
    assert learned(encoded) == learned(encode_with(CHAT_TEMPLATE))
    assert len(encoded.input_ids) == len(encode_with(CHAT_TEMPLATE).input_ids) + 3


def test_end_token_other_than_eos(encode_with):
    """Llama-3's form: the turn ends with a special token of its own, and EOS only ends the conversation."""
    template = CHAT_TEMPLATE.replace("m['content'] + eos_token }}", "m['content'] + pad_token }}")
    assert learned(encode_with(template)) == [
        0 if token == 2 else token for token in learned(encode_with(CHAT_TEMPLATE))
    ]
    behind_pad = CHAT_TEMPLATE.replace("m['content'] + eos_token }}", "m['content'] + pad_token + eos_token }}")
    assert learned(encode_with(behind_pad, ONE_TURN)) == [*tiny_ids(" Paris"), 0, 2]


def test_end_token_is_not_taken_from_the_next_turn(encode_with):
    template = CHAT_TEMPLATE.replace(" + eos_token", "").replace("{{ 'User: '", "{{ pad_token + 'User: '")
    with pytest.raises(UserError, match="no end token"):
        encode_with(template, chat("Hi", "Paris", "And?"))


LAST_TURN_DIFFERS = CHAT_TEMPLATE.replace(
    "{{ 'Assistant: ' + m['content'] + eos_token }}",
    "{{ 'Assistant: ' + ('<think></think>' if loop.last else '') + m['content'] + eos_token }}",
)
TEMPLATE_FAULTS = {
    "not prefix-stable": LAST_TURN_DIFFERS,
    "writes 'Assistant: ' before": CHAT_TEMPLATE.replace("{{ 'Assistant:' }}", ""),
    "no end token": CHAT_TEMPLATE.replace(" + eos_token", ""),
    "leaves out or changes message 1 (system)": CHAT_TEMPLATE.replace("{{ m['content'] + '\n\n' }}", ""),
    "BOS must stand once": CHAT_TEMPLATE.replace("{{ 'User: '", "{{ bos_token + 'User: '"),
    "refuses this conversation: no system": CHAT_TEMPLATE.replace(
        "{{ m['content'] + '\n\n' }}", "{{ raise_exception('no system') }}"
    ),
    "marks every token": "{% generation %}" + CHAT_TEMPLATE + "{% endgeneration %}",
    "marks 0 spans": CHAT_TEMPLATE + "{% if false %}{% generation %}{% endgeneration %}{% endif %}",
    "marks 1 spans for 3": MARKED.replace(
        "{% elif m['role'] == 'assistant' %}",
        "{% elif m['role'] == 'assistant' and not loop.last %}{{ m['content'] + eos_token }}"
        "{% elif m['role'] == 'assistant' %}",
    ),
    "not the text of message 3": MARKED.replace(
        "{{ 'Assistant:' }}{% generation %}", "{% generation %}{{ 'Assistant:' }}"
    ),
    "is not valid Jinja": CHAT_TEMPLATE + "{% endif %}",
}


@pytest.mark.parametrize("message", TEMPLATE_FAULTS)
def test_templates_that_would_train_something_else_are_refused(encode_with, message):
    with pytest.raises(UserError) as error:
        encode_with(TEMPLATE_FAULTS[message])
    assert message in str(error.value)
    assert "; " in str(error.value)  # a remedy follows


def test_header_inside_markers_is_refused_for_the_first_of_several_turns(encode_with):
    """All text but BOS marked: one run for one turn, so only its place gives it away."""
    template = CHAT_TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{% generation %}") + "{% endgeneration %}"
    with pytest.raises(UserError, match="which is not the text of message 2"):
        encode_with(template, ONE_TURN)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "Hi"}], chat_module.NO_ASSISTANT),
        ([], chat_module.NO_ASSISTANT),
        ([{"role": "assistant", "content": "Hi"}], chat_module.NO_QUESTION),
        (chat("Hi", " \n"), chat_module.EMPTY_ASSISTANT),
        (chat("say <eos> please", "Paris"), chat_module.SPECIAL_IN_TEXT),
        (chat("Hi", "Paris<eos>"), chat_module.SPECIAL_IN_TEXT),
        (chat("Hi", "Pa\ud800ris"), chat_module.BAD_UNICODE),
    ],
)
def test_conversations_that_cannot_be_samples(tiny, messages, reason):
    with pytest.raises(RowRejected) as error:
        ChatEncoder(tiny).encode(messages)
    assert str(error.value) == reason


def test_turn_inside_a_token_is_rejected(tmp_path):
    """A tokenizer that joins ':' and ' ' would learn half of the prompt's last token."""
    from tests.tiny import make_tiny_tokenizer

    directory = make_tiny_tokenizer(tmp_path)
    saved = json.loads((directory / "tokenizer.json").read_text())
    saved["model"]["vocab"][":Ġ"] = len(saved["model"]["vocab"])
    saved["model"]["merges"] = [[":", "Ġ"]]
    (directory / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(RowRejected, match=chat_module.TURN_INSIDE_TOKEN):
        ChatEncoder(load_tokenizer(directory)).encode(ONE_TURN)


def test_tokenizer_without_template(tmp_path):
    from tests.tiny import make_tiny_tokenizer

    with pytest.raises(UserError, match=r"need a chat template: .* has none; use the Chat model"):
        ChatEncoder(load_tokenizer(make_tiny_tokenizer(tmp_path, chat_template=None)))


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(lambda s: "<" not in s)
answers = texts.filter(lambda s: s.strip())


@pytest.mark.parametrize("name", ["tiny", "deepseek"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.tuples(texts, answers), min_size=1, max_size=3))
def test_learned_text_is_the_assistants_and_its_end(request, name, turns):
    """Both templates write a space before the answer, behind the generation prompt: the model has to write it."""
    tokenizer = request.getfixturevalue(name)
    try:
        encoded = ChatEncoder(tokenizer).encode(chat(*(text for turn in turns for text in turn)))
    except RowRejected as reason:
        assert str(reason) == chat_module.TURN_INSIDE_TOKEN
        assert name == "deepseek"  # bytes cannot join
        return
    expected = "".join(f" {answer}{tokenizer.eos_token}" for _, answer in turns)
    assert tokenizer.decode(learned(encoded), skip_special_tokens=False) == expected
    assert encoded.input_ids.count(tokenizer.bos_token_id) == 1
