"""JSON that Python would read as something else, or not at all, is refused in one line."""

import pytest

from megatron_patch.io.strict_json import parse_json, read_json


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 1}', "'a' stands twice"),
        ('[{"b": {"c": 1, "c": 2}}]', "'c' stands twice"),
        ("9" * 5000, "a number has thousands of digits"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "Expecting property name"),
        ("", "Expecting value"),
    ],
)
def test_refused(text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_json(text)
    assert "\n" not in str(error.value)


def test_accepted(tmp_path):
    text = '{"a": [1, {"b": null}], "c": {"a": 2}, "d": -1e3}'
    assert parse_json(text) == {"a": [1, {"b": None}], "c": {"a": 2}, "d": -1000.0}
    (tmp_path / "x").write_text(text)
    assert read_json(tmp_path / "x") == parse_json(text)
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        read_json(tmp_path / "x")
