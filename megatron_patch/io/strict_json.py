"""JSON as strictly as one reads a contract: Python's own reader keeps the last of two equal keys without a word."""

import json
from pathlib import Path
from typing import Any


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: no JSON (as `json.JSONDecodeError`, with its position), a key that stands twice in an object, a number
            beyond Python's digit limit, or nesting beyond its stack; the message is one line.
    """
    try:
        return json.loads(text, object_pairs_hook=_object_without_duplicates)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        if "limit" in str(error) and "digits" in str(error):
            raise ValueError("a number has thousands of digits") from None
        raise


def read_json(file: str | Path) -> Any:
    """`parse_json` of a UTF-8 file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no UTF-8 (as `UnicodeDecodeError`) or no strict JSON.
    """
    return parse_json(Path(file).read_text(encoding="utf-8"))


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"{twice!r} stands twice")
    return result
