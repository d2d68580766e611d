"""The command line: a mistake of the user is one line, and the line leads to the right flag."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from megatron_patch.errors import UserError
from megatron_patch.flags import flag_names, parse


@dataclass
class Schedule:
    lr: float = 1e-4
    """Peak rate."""
    style: Literal["cosine", "linear"] = "cosine"
    """How it falls."""

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise UserError(f"--lr must not be negative: {self.lr}; give 0 or more")


@dataclass
class Settings:
    """What a run needs."""

    base_model: Path
    """The base."""
    prefixes: tuple[str, ...] = ()
    """Data."""
    bf16: bool = False
    """Half precision."""
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        if self.bf16 and self.schedule.style == "linear":
            raise UserError("--bf16 wants --style cosine: linear; leave one out")


@dataclass
class Check:
    export: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="EXPORT")]
    """What to check."""
    base: Path
    """Against this."""


def message(*argv: str, cls: type = Settings) -> str:
    with pytest.raises(UserError) as caught:
        parse(cls, argv, "train.py")
    text = str(caught.value)
    assert "\n" not in text and "│" not in text
    return text


ASCII = """import sys
from megatron_patch import errors, flags
from megatron_patch.data.show import ShowSettings
sys.exit(errors.run(lambda: flags.parse(ShowSettings, sys.argv[1:], "show_samples.py")))
"""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@pytest.mark.parametrize(
    "argv, line",
    [
        ([], "error: required and missing: PATH; see show_samples.py --help"),
        (["p", "--n", "x"], "error: --n: invalid literal for int() with base 10: 'x'; see show_samples.py --help"),
        (["p", "--n", "-1"], "error: --n must be positive: -1; give 1 or more"),
    ],
)
def test_messages_do_not_depend_on_the_terminals_encoding(encoding: str, argv: list[str], line: str) -> None:
    """tyro frames its messages with other characters where stdout is not UTF-8."""
    env = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", ASCII, *argv], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, line + "\n")


def test_flags_are_flat_and_typed() -> None:
    got = parse(Settings, ["--base-model", "b", "--lr=3e-4", "--bf16", "--prefixes", "0.3", "p"], "train.py")
    assert got == Settings(Path("b"), ("0.3", "p"), True, Schedule(3e-4))


def test_megatron_spellings() -> None:
    """Launch lines from Megatron use underscores here and there; booleans can be turned off."""
    assert parse(Settings, ["--base_model=b", "--bf16", "--no-bf16"], "train.py") == Settings(Path("b"))


def test_flag_names_hold_both_forms_of_a_boolean_and_no_positional() -> None:
    assert flag_names(Settings) == ["--base-model", "--prefixes", "--bf16", "--no-bf16", "--lr", "--style"]
    assert flag_names(Check) == ["--base"]


def test_two_groups_cannot_share_a_flag() -> None:
    @dataclass
    class Twice:
        a: Schedule
        b: Schedule

    with pytest.raises(TypeError, match="--lr"):
        flag_names(Twice)


def test_unknown_flag_names_the_nearest() -> None:
    assert message("--base-model", "b", "--sytle=linear") == "unknown flag --sytle; did you mean --style; see train.py --help"
    assert message("--base-model", "b", "--zzz") == "unknown flag --zzz; see train.py --help"


def test_a_mistyped_required_flag_is_reported_as_mistyped() -> None:
    """tyro alone says that --base-model is missing, which the user believes to have given."""
    assert "did you mean --base-model" in message("--base-mdoel", "b")


def test_missing_flags_are_listed() -> None:
    assert message() == "required and missing: --base-model; see train.py --help"
    assert message(cls=Check) == "required and missing: EXPORT, --base; see train.py --help"


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["--lr", "abc"], ["--lr", "'abc'"]),
        (["--lr"], ["--lr", "Missing value"]),
        (["--style", "step"], ["--style", "'step'", "cosine", "linear"]),
        (["--bf16", "True"], ["'True'", "--no-x"]),
        (["stray"], ["'stray'"]),
    ],
)
def test_bad_values(argv: list[str], parts: list[str]) -> None:
    text = message("--base-model", "b", *argv)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("width", ["40", "200"])
def test_a_message_does_not_depend_on_the_terminal(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    value = "a value that is much longer than a narrow terminal is wide, so that the report must wrap"
    assert f"--lr: could not convert string to float: '{value}'" in message("--base-model", "b", "--lr", value)


def test_rules_of_the_settings_keep_their_words() -> None:
    """Also when the rule spans groups, where tyro prefixes its own words."""
    assert message("--base-model", "b", "--lr", "-1") == "--lr must not be negative: -1.0; give 0 or more"
    assert message("--base-model", "b", "--bf16", "--style", "linear") == "--bf16 wants --style cosine: linear; leave one out"


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(Settings, ["--help"], "train.py", "Example: train.py --base-model b")
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert all(part in text for part in ["Example: train.py --base-model b", "--lr", "Peak rate.", "0.0001"]), text
