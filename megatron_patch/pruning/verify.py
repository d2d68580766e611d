"""Is a pruned checkpoint what its plan says? Read anew from both directories, not from what `apply` remembers."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from megatron_patch.claims import all_hold, examine, print_table, say_failures
from megatron_patch.errors import EXIT_OK, EXIT_USER
from megatron_patch.io.publish import atomic_write_json
from megatron_patch.pruning import verify_checks, verify_logits
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.plan_file import read_plan
from megatron_patch.pruning.verify_checks import Pair

SCHEMA = 1


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
    checks = [examine(name, claim) for name, claim in claims]
    sound = all_hold(checks)
    checks.append(examine("masked oracle", lambda: verify_logits.logits(pair, logits, sound, max_model_gb)))
    passed = all_hold(checks)
    print_table(f"verify {pair.path}", checks)
    if json_file is not None:
        content = {
            "schema": SCHEMA,
            "verdict": "pass" if passed else "fail",
            "checks": [asdict(item) for item in checks],
        }
        atomic_write_json(json_file, content)
    if passed:
        return EXIT_OK
    say_failures(f"a pruned checkpoint ({pair.path})", checks, "apply the plan again")
    return EXIT_USER
