"""The layer pattern: a visible list of what each layer's attention is, bottom to top."""

import re

from megatron_patch.errors import UserError

MLA, DSA = "mla", "dsa"
_ITEM = re.compile(r"(mla|dsa)(?:\*([1-9][0-9]*))?")
MOST_LAYERS = 1000  # a slip of the finger in a count would else fill the memory before anything is checked


def parse_layer_pattern(text: str) -> tuple[str, ...]:
    """`"mla*27,dsa*2"` -> `("mla",) * 27 + ("dsa",) * 2`.

    Raises:
        UserError: an item that is not `mla` or `dsa`, with an optional count; or too many layers.
    """
    layers: list[str] = []
    for item in text.replace(" ", "").split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise UserError(f"a layer pattern is mla or dsa with counts: {item!r} in {text!r}; write e.g. mla*27,dsa*2")
        count = match[2] or "1"
        _check_count(len(layers) + int(count) if len(count) < 10 else count)
        layers += [match[1]] * int(count)
    return tuple(layers)


def appended_pattern(num_base_layers: int, num_dsa_layers: int) -> tuple[str, ...]:
    """The base's layers with `num_dsa_layers` DSA layers on top."""
    if num_dsa_layers < 0:
        raise UserError(f"--dsa-layers must be 0 or more: {num_dsa_layers}; the default is 2")
    _check_count(num_base_layers + num_dsa_layers)
    return (MLA,) * num_base_layers + (DSA,) * num_dsa_layers


def _check_count(layers: int | str) -> None:
    """`layers`: a string where it is too long to be a number."""
    if isinstance(layers, str) or layers > MOST_LAYERS:
        raise UserError(f"a model has at most {MOST_LAYERS} layers: {layers}; lower the count")


def check_pattern(pattern: tuple[str, ...], num_base_layers: int) -> None:
    """Base layers first, all of them, then the new ones: the base's own numbering must stay valid in the export.

    Raises:
        UserError: the pattern does not start with exactly the base's layers.
    """
    if pattern != appended_pattern(num_base_layers, len(pattern) - num_base_layers):
        raise UserError(
            f"the layer pattern must be the base's {num_base_layers} mla layers followed by dsa layers: "
            f"{format_pattern(pattern)}; write mla*{num_base_layers},dsa*2"
        )


def format_pattern(pattern: tuple[str, ...]) -> str:
    """The inverse of `parse_layer_pattern`, in its shortest form."""
    runs: list[list] = []
    for kind in pattern:
        if runs and runs[-1][0] == kind:
            runs[-1][1] += 1
        else:
            runs.append([kind, 1])
    return ",".join(kind if count == 1 else f"{kind}*{count}" for kind, count in runs)
