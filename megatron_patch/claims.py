"""Claims about a directory, checked one by one: a table for people, rows for JSON. `check` and `prune verify` are made of it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from megatron_patch.errors import UserError

OK, FAIL, SKIPPED = "ok", "FAIL", "skipped"


class Failed(Exception):
    """A claim does not hold; the message says how."""


class Skipped(Exception):
    """A claim does not apply; the message says why."""


@dataclass(frozen=True)
class Check:
    """One line of the result."""

    name: str
    status: str
    detail: str


def examine(name: str, claim: Callable[[], str]) -> Check:
    """Run a claim: it returns what it saw, or raises `Failed`, `Skipped`, or a `UserError`, which fails it too."""
    try:
        return Check(name, OK, claim())
    except Skipped as reason:
        return Check(name, SKIPPED, str(reason))
    except (Failed, UserError) as reason:
        return Check(name, FAIL, str(reason))


def all_hold(checks: list[Check]) -> bool:
    """Whether none failed."""
    return all(item.status != FAIL for item in checks)


def print_table(title: str, checks: list[Check]) -> None:
    """The checks and the verdict, on the console."""
    table = Table(title=title, title_justify="left")
    for column in ("check", "result", "detail"):
        table.add_column(column, overflow="fold")
    colours = {OK: "green", FAIL: "bold red", SKIPPED: "yellow"}
    for item in checks:
        table.add_row(item.name, f"[{colours[item.status]}]{item.status}[/]", item.detail.replace("[", r"\["))
    console = Console()
    console.print(table)
    console.print("verdict: " + ("pass" if all_hold(checks) else "FAIL"), style="bold")


def say_failures(what: str, checks: list[Check], remedy: str) -> None:
    """The one `error:` line of a command that ends with exit code 2: which checks failed, and how the first did."""
    failed = [item for item in checks if item.status == FAIL]
    names, detail = ", ".join(item.name for item in failed), " ".join(failed[0].detail.split())
    print(f"error: {what} must pass every check: it fails {names}: {detail}; {remedy}", file=sys.stderr)
