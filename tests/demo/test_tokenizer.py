"""The demo's tokenizer: nothing is lost, BOS and EOS are where a chat needs them, symbols are single tokens."""

import pytest

from megatron_patch.demo.base_training import encode_conversation
from megatron_patch.demo.tasks import NAMES, THINGS
from megatron_patch.demo.tokenizer import BOS, BOS_ID, EOS, EOS_ID

CHAT = [
    {"role": "user", "content": "Ada lamp Bob ring\nWho?"},
    {"role": "assistant", "content": "Ada lamp"},
    {"role": "user", "content": "41"},
    {"role": "assistant", "content": "42"},
]


@pytest.mark.parametrize(
    "text",
    [
        "Emma Woodhouse, handsome",
        "  two  spaces ",
        "a\n\n\nb\t",
        "héllo wörld",
        "日本語 🙂",
        "User:Ada 1234\n\nAssistant: x",
        "\x00\x7f",
    ],
)
def test_any_text_survives_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_special_ids_and_size(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (BOS_ID, EOS_ID, EOS_ID)
    assert len(tokenizer) == 1024
    assert tokenizer.encode(BOS + EOS, add_special_tokens=False) == [BOS_ID, EOS_ID]
    assert tokenizer("a").input_ids == tokenizer("a", add_special_tokens=False).input_ids  # BOS is the template's


@pytest.mark.parametrize("word", [*(" " + word for word in NAMES + THINGS), *"0123456789", "\n\n", "Assistant:"])
def test_symbols_are_one_token(tokenizer, word):
    assert len(tokenizer.encode(word, add_special_tokens=False)) == 1


def test_template_is_deepseek_v2s(tokenizer):
    text = tokenizer.apply_chat_template(CHAT[:3], tokenize=False, add_generation_prompt=True)
    assert text == f"{BOS}User: Ada lamp Bob ring\nWho?\n\nAssistant: Ada lamp{EOS}User: 41\n\nAssistant:"


def test_generation_markers_give_the_assistants_tokens(tokenizer):
    """Also: encoding message by message, as the base's training does, equals encoding the rendered chat."""
    encoded = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids, said = encode_conversation(tokenizer, CHAT)
    assert encoded["input_ids"] == ids
    assert encoded["assistant_masks"] == [int(flag) for flag in said]
    spoken = [token for token, flag in zip(tokenizer.convert_ids_to_tokens(ids), said) if flag]
    assert spoken == ["▁Ada", "▁lamp", EOS, "▁", "4", "2", EOS]
    assert ids.count(BOS_ID) == 1
