"""Is a pruned checkpoint what its plan says? Read anew from both directories, not from what `apply` remembers."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_patch.errors import EXIT_OK, EXIT_USER, UserError
from megatron_patch.io.publish import atomic_write_json
from megatron_patch.pruning import verify_checks
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.plan_file import read_plan
from megatron_patch.pruning.verify_checks import Failed, Pair, Skipped

SCHEMA = 1
OK, FAIL, SKIPPED = "ok", "FAIL", "skipped"


@dataclass(frozen=True)
class Check:
    """One claim about a pruned checkpoint."""

    name: str
    status: str
    detail: str


def run(
    model: str | Path,
    pruned: str | Path,
    plan: str | Path,
    *,
    json_file: str | Path | None = None,
    logits: bool = True,
    max_model_gb: float = 8.0,
) -> int:
    """`dsa-upcycle prune verify`: check, print a table, and optionally write it as JSON.

    Args:
        model: the source's directory.
        pruned: what `prune apply` wrote.
        plan: the plan that it was written by.
        json_file: where to write `{"schema": 1, "verdict": "pass"|"fail", "checks": [{"name", "status", "detail"}]}`.
        logits: also run both models, one after the other, in fp32 on the CPU.
        max_model_gb: the largest source to run, in 1e9 bytes of fp32.

    Returns:
        0 if every check passed or did not apply, 2 if one failed.

    Raises:
        UserError: the source is damaged, or the plan is not for it.
    """
    source = MoeCheckpoint(model)
    pair = Pair(source, read_plan(plan, source), Path(pruned))
    claims: list[tuple[str, Callable[[], str]]] = [
        ("index", lambda: verify_checks.index(pair)),
        ("names and numbers", lambda: verify_checks.names(pair)),
        ("shapes", lambda: verify_checks.shapes(pair)),
        ("kept tensors", lambda: verify_checks.kept_bytes(pair)),
        ("routers", lambda: verify_checks.router_rows(pair)),
        ("hash tables", lambda: verify_checks.tables(pair)),
        ("config", lambda: verify_checks.config(pair)),
        ("other files", lambda: verify_checks.other_files(pair)),
    ]
    checks = [_run(name, claim) for name, claim in claims]
    sound = all(item.status != FAIL for item in checks)
    checks.append(_run("masked oracle", lambda: verify_checks.logits(pair, logits, sound, max_model_gb)))
    passed = all(item.status != FAIL for item in checks)
    _print(pair.path, checks, passed)
    if json_file is not None:
        content = {
            "schema": SCHEMA,
            "verdict": "pass" if passed else "fail",
            "checks": [asdict(item) for item in checks],
        }
        atomic_write_json(json_file, content)
    return EXIT_OK if passed else EXIT_USER


def _run(name: str, claim: Callable[[], str]) -> Check:
    try:
        return Check(name, OK, claim())
    except Skipped as reason:
        return Check(name, SKIPPED, str(reason))
    except (Failed, UserError) as reason:
        return Check(name, FAIL, str(reason))


def _print(path: Path, checks: list[Check], passed: bool) -> None:
    table = Table(title=f"verify {path}", title_justify="left")
    for column in ("check", "result", "detail"):
        table.add_column(column, overflow="fold")
    colours = {OK: "green", FAIL: "bold red", SKIPPED: "yellow"}
    for item in checks:
        table.add_row(item.name, f"[{colours[item.status]}]{item.status}[/]", item.detail.replace("[", r"\["))
    console = Console()
    console.print(table)
    console.print("verdict: " + ("pass" if passed else "FAIL"), style="bold")
