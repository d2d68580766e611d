"""Chat rows in three published forms -> one: a list of {"role": system|user|assistant, "content": str}."""

from typing import Any

from megatron_patch.data.readers import type_name
from megatron_patch.errors import UserError

FORMS = ("messages", "conversations", "instruction")
ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
}
Message = dict[str, str]


def parse_conversation(row: dict[str, Any], where: str) -> list[Message]:
    """The messages of a row.

    Args:
        row: OpenAI's form (`messages`: role, content), ShareGPT's (`conversations`: from, value; optional `system`) or
            Alpaca's (`instruction`, optional `input`, `output`; optional `system` and `history`).
        where: the row's name for messages.

    Raises:
        UserError: none of the three or more than one, a wrong type, or an unknown role.
    """
    forms = [key for key in FORMS if row.get(key) is not None]  # parquet gives every row every column
    if len(forms) > 1:
        raise UserError(
            f"{where}: a chat row has one of {', '.join(map(repr, FORMS))}: this one has {' and '.join(map(repr, forms))}; "
            "remove all but the conversation to learn"
        )
    if forms == ["messages"]:
        return [_openai_message(m, f"{where}: message {i}") for i, m in enumerate(_list(row, "messages", where), 1)]
    if forms == ["conversations"]:
        turns = _list(row, "conversations", where)
        return _system(row, where) + [_sharegpt_message(m, f"{where}: turn {i}") for i, m in enumerate(turns, 1)]
    if forms == ["instruction"]:
        return _alpaca(row, where)
    raise UserError(
        f"{where}: a chat row has 'messages', 'conversations' or 'instruction'; this one has "
        f"{', '.join(repr(k) + (' (null)' if k in FORMS else '') for k in sorted(row)) or 'no keys'}; convert it to one "
        "of the three forms"
    )


def _openai_message(message: Any, where: str) -> Message:
    for key in ("tool_calls", "function_call"):
        if isinstance(message, dict) and message.get(key):
            raise UserError(f"{where}: tool calls are not supported: it has {key!r}; write the call as text in 'content'")
    if isinstance(message, dict) and message.get("weight") not in (None, 1):  # OpenAI's 0: not to be learned
        raise UserError(
            f"{where}: 'weight' must be 1 or absent, every assistant turn is learned: {message['weight']!r}; split the "
            "conversation before that turn, or remove the key"
        )
    role = _string(message, "role", where)
    if role not in ROLES:
        raise UserError(f"{where}: unknown role {role!r}; use one of {', '.join(ROLES)}")
    return {"role": role, "content": _string(message, "content", where)}


def _sharegpt_message(message: Any, where: str) -> Message:
    role = _string(message, "from", where)
    if role not in SHAREGPT_ROLES:
        raise UserError(f"{where}: unknown role {role!r} in 'from'; use one of {', '.join(SHAREGPT_ROLES)}")
    return {"role": SHAREGPT_ROLES[role], "content": _string(message, "value", where)}


def _alpaca(row: dict[str, Any], where: str) -> list[Message]:
    messages = _system(row, where)
    history = row if row.get("history") is not None else {"history": []}
    for i, pair in enumerate(_list(history, "history", where), 1):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise UserError(
                f"{where}: 'history' entry {i} must be a list of two strings: question and answer; mend the row"
            )
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = _string(row, "instruction", where)
    extra = row.get("input")
    if extra is not None and not isinstance(extra, str):
        raise UserError(f"{where}: 'input' must be a string, not {type_name(extra)}; mend the row")
    question = f"{question}\n\n{extra}" if extra else question
    answer = _string(row, "output", where)
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _system(row: dict[str, Any], where: str) -> list[Message]:
    return [{"role": "system", "content": _string(row, "system", where)}] if row.get("system") else []


def _list(row: dict[str, Any], key: str, where: str) -> list[Any]:
    if not isinstance(row[key], list):
        raise UserError(f"{where}: {key!r} must be a list, not {type_name(row[key])}; mend the row")
    return row[key]


def _string(holder: Any, key: str, where: str) -> str:
    if not isinstance(holder, dict):
        raise UserError(f"{where}: must be an object, not {type_name(holder)}; mend the row")
    if key not in holder:
        raise UserError(
            f"{where}: no key {key!r}; it has {', '.join(map(repr, sorted(holder))) or 'no keys'}; mend the row"
        )
    if not isinstance(holder[key], str):
        raise UserError(f"{where}: {key!r} must be a string, not {type_name(holder[key])}; mend the row")
    return holder[key]
