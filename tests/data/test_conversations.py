"""The three published forms of chat rows, and the faults that rows have."""

import pytest

from megatron_patch.data.conversations import parse_conversation
from megatron_patch.errors import UserError
from tests.data.files import chat

EXPECTED = chat("Hi", "Hello", "Bye", "See you", system="Be kind")


def test_openai_form():
    assert parse_conversation({"messages": EXPECTED, "source": "x"}, "f:1") == EXPECTED


def test_sharegpt_form():
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in EXPECTED]
    assert parse_conversation({"conversations": turns}, "f:1") == EXPECTED
    assert parse_conversation({"system": "Be kind", "conversations": turns[1:]}, "f:1") == EXPECTED


def test_alpaca_form():
    row = {"instruction": "Add", "input": "1 2", "output": "3"}
    assert parse_conversation(row, "f:1") == chat("Add\n\n1 2", "3")
    assert parse_conversation({**row, "input": ""}, "f:1") == chat("Add", "3")
    full = {"instruction": "Bye", "output": "See you", "history": [["Hi", "Hello"]], "system": "Be kind", "input": None}
    assert parse_conversation(full, "f:1") == EXPECTED


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "f:1: a chat row has 'messages', 'conversations' or 'instruction'; this one has 'text'"),
        ({"messages": "x"}, "f:1: 'messages' must be a list, not a string"),
        ({"messages": ["x"]}, "f:1: message 1: must be an object, not a string"),
        ({"messages": [{"role": "user"}]}, "f:1: message 1: no key 'content'; it has 'role'"),
        ({"messages": [{"role": "user", "content": None}]}, "f:1: message 1: 'content' must be a string, not null"),
        ({"messages": [{"role": "user", "content": [1]}]}, "f:1: message 1: 'content' must be a string, not a list"),
        ({"messages": [*EXPECTED, {"role": "tool", "content": "x"}]}, "f:1: message 6: unknown role 'tool'"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "tool calls are not supported"),
        (
            {"conversations": [{"from": "observation", "value": "x"}]},
            "f:1: turn 1: unknown role 'observation' in 'from'",
        ),
        ({"instruction": 3, "output": "x"}, "f:1: 'instruction' must be a string, not a number"),
        ({"instruction": "x"}, "f:1: no key 'output'"),
        ({"instruction": "x", "output": "y", "input": {}}, "f:1: 'input' must be a string, not an object"),
        (
            {"instruction": "x", "output": "y", "history": [["a"]]},
            "f:1: 'history' entry 1 must be a list of two strings",
        ),
    ],
)
def test_faulty_rows_are_named(row, message):
    with pytest.raises(UserError) as error:
        parse_conversation(row, "f:1")
    assert message in str(error.value)
    assert "; " in str(error.value)
