"""Command lines from dataclasses: flat flags, and every mistake is one line that names the remedy.

tyro makes the flags and the help text; it reports a mistake as a box of several lines and ends the process. Scripts and
logs of many ranks want one line and our exit code instead, so the box is caught and its first statement is raised as a
`UserError`.
"""

import contextlib
import dataclasses
import difflib
import io
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import tyro

from megatron_patch.errors import EXIT_OK, EXIT_USER, UserError

T = TypeVar("T")


def parse(cls: type[T], argv: Sequence[str], prog: str, description: str = "") -> T:
    """Build `cls` from the command line.

    A nested dataclass is a group in `--help` and leaves no prefix on its flags. A boolean is `--x` or `--no-x`;
    underscores are accepted for hyphens. `--help` prints and raises `SystemExit(0)`.

    Args:
        cls: a dataclass, a docstring under each field; fields of dataclass type are groups.
        argv: arguments without the program's name.
        prog: the program's name in messages and help.
        description: text above the flags in `--help`; default: the docstring of `cls`.

    Raises:
        UserError: an unknown flag (with the nearest known one), a missing or malformed value, or a rule of `cls`.
    """
    _refuse_unknown_flags(flag_names(cls), argv, prog)
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            settings, rest = tyro.cli(
                tyro.conf.OmitArgPrefixes[cls],
                args=list(argv),
                prog=prog,
                description=description or None,
                return_unknown_args=True,
            )
    except SystemExit as end:
        if not end.code:
            raise
        rule = _user_error_behind(end)
        raise UserError(rule or f"{_first_statement(box.getvalue())}; see {prog} --help") from None
    if rest:
        raise UserError(f"every value follows its flag: unexpected {rest[0]!r}; booleans are --x or --no-x, see {prog} --help")
    return settings


def flag_names(cls: type) -> list[str]:
    """The flags of a dataclass, `--no-x` included, groups flattened.

    Raises:
        TypeError: two groups have a field of the same name: without prefixes they would be one flag.
    """
    names: list[str] = []
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            names += flag_names(kind)
            continue
        if tyro.conf.Positional in typing.get_args(kind):
            continue
        flag = field.name.replace("_", "-")
        names += [f"--{flag}", f"--no-{flag}"] if kind is bool else [f"--{flag}"]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise TypeError(f"{cls.__name__} has more than one field for {sorted(twice)}")
    return names


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"did you mean --lr; "`, or an empty string where nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}; " if near else ""


def call_command(name: str, argv: Sequence[str], commands: Mapping[str, type], prog: str, others: Iterable[str] = ()) -> int | None:
    """Parse `argv` for the command `name`, and call it.

    Args:
        commands: dataclasses that can be called, by name; `others` are names that the caller knows beside them.
        prog: what stands before the name in messages and help.

    Raises:
        UserError: no such command or flag, or the command refuses its input.
    """
    if name not in commands:
        known = [*commands, *others]
        typed = f"{prog.partition(' ')[2]} {name}".strip()  # without the program's own name
        raise UserError(f"unknown command {typed}; {did_you_mean(name, known)}commands: {', '.join(known)}")
    return parse(commands[name], argv, f"{prog} {name}")()


def call_group(argv: Sequence[str], commands: Mapping[str, type], prog: str) -> int | None:
    """Run the command of a group that `argv` names; the group's usage without one, or for `--help`.

    Raises:
        UserError: no such command or flag, or the command refuses its input.
    """
    if argv and argv[0] not in ("-h", "--help", "help"):
        return call_command(argv[0], argv[1:], commands, prog)
    rows = command_rows({name: command.__doc__.splitlines()[0] for name, command in commands.items()})
    print("\n".join([f"usage: {prog} <command> [flags]        {prog} <command> --help", "", *rows]))
    return EXIT_OK if argv else EXIT_USER


def command_rows(summaries: Mapping[str, str]) -> list[str]:
    """A line of help for each command: its name, and what it does."""
    width = max(map(len, summaries))
    return [f"  {name:<{width}}  {summary}" for name, summary in summaries.items()]


def _refuse_unknown_flags(known: list[str], argv: Sequence[str], prog: str) -> None:
    """Before tyro, which would first report the required flag that a typing mistake left unset."""
    for token in argv:
        flag = token.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in known and flag != "--help":
            raise UserError(f"unknown flag {flag}; {did_you_mean(flag, known)}see {prog} --help")


def _user_error_behind(end: BaseException) -> UserError | None:
    """The rule of `cls` that tyro turned into an exit (it catches every ValueError), if that is why."""
    error: BaseException | None = end
    while error is not None:
        if isinstance(error, UserError):
            return error
        error = error.__context__
    return None


def _first_statement(box: str) -> str:
    """One line from tyro's box: its text up to the first rule, without title and frame.

    The frame is of line-drawing characters, or of blanks and hyphens where stdout is not UTF-8.
    """
    lines = [line.strip("│").rstrip() for line in box.splitlines()[1:]]
    if lines and set(lines[0].strip()) == {"-"}:  # the rule under a plain title
        del lines[0]
    rule = next((i for i, line in enumerate(lines) if set(line.strip()) in ({"─"}, {"-"})), len(lines))
    lines = [line for line in lines[:rule] if line.strip()]
    if lines and lines[0].strip().startswith("Missing from"):
        indent = re.match(r"\s*", lines[1])[0]  # the flags'; their help stands further in
        names = [match[1] for line in lines if (match := re.match(indent + r"(--[\w-]+|[A-Z][A-Z_]*)\b", line))]
        return f"required and missing: {', '.join(names)}"
    statement = re.sub(r"Expected one of \((.*?)\)", _choices, " ".join(" ".join(lines).split()))
    return statement.removeprefix("Error parsing ").rstrip(".") or " ".join(box.split())


def _choices(found: re.Match) -> str:
    """tyro's choices, which it takes from a set, in one order; an optional flag is left out, not set to None."""
    given = set(found[1].split(", ")) - {"'None'"}
    return f"Expected one of {', '.join(sorted(given))}"
