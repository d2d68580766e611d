"""What happened to every row: kept, or dropped for a reason. The same bookkeeping for both preparation scripts."""

import sys
from collections import Counter
from dataclasses import dataclass, field

from megatron_patch.errors import UserError

EXAMPLES_PER_REASON = 3


@dataclass
class RowCounts:
    """Counts of input rows; `merge` adds another chunk's. `rows` = kept + sum of `dropped`."""

    rows: int = 0
    kept: int = 0
    blank_lines: int = 0
    dropped: Counter = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, where: str, strict: bool) -> None:
        """Count a row that is left out.

        Raises:
            UserError: `strict`.
        """
        if strict:
            raise UserError(
                f"{where}: {reason}, and --strict allows no dropped row; mend the row or leave out --strict"
            )
        self.dropped[reason] += 1
        self.examples.setdefault(reason, []).append(where)

    def merge(self, other: "RowCounts") -> None:
        """Add the counts of a later chunk."""
        self.rows += other.rows
        self.kept += other.kept
        self.blank_lines += other.blank_lines
        self.dropped.update(other.dropped)
        for reason, places in other.examples.items():
            known = self.examples.setdefault(reason, [])
            known.extend(places[: EXAMPLES_PER_REASON - len(known)])

    def refuse_nothing_kept(self, what: str, remedy: str) -> None:
        """Raise when no row is left.

        Raises:
            UserError: with the counts and the first places.
        """
        if self.kept:
            return
        reasons = "; ".join(f"{n} dropped: {r} (first: {self.examples[r][0]})" for r, n in self.dropped.items())
        raise UserError(f"no {what} left of {self.rows} rows ({reasons or 'the input has no rows'}); {remedy}")


def print_table(title: str, lines: list[tuple[str, int | str]]) -> None:
    """A two-column table on stdout: what was counted, and the count."""
    width = max(len(name) for name, _ in lines)
    values = [f"{value:,}" if isinstance(value, int) else value for _, value in lines]
    right = max(map(len, values))
    print(title)
    for (name, _), value in zip(lines, values, strict=True):
        print(f"  {name:<{width}}  {value:>{right}}")
    sys.stdout.flush()


def table_lines(counts: RowCounts, kept: str) -> list[tuple[str, int | str]]:
    """The lines that both scripts print: rows, blank lines, kept, each reason for dropping with its first "
    "places."""
    lines: list[tuple[str, int | str]] = [("rows", counts.rows), (kept, counts.kept)]
    if counts.blank_lines:
        lines.append(("blank lines skipped", counts.blank_lines))
    for reason, number in sorted(counts.dropped.items()):
        lines.append((f"dropped: {reason}", number))
        lines += [("    e.g.", place) for place in counts.examples[reason]]
    return lines
