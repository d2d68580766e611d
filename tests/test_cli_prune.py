"""`dsa-upcycle prune`: its commands are found, and their help and examples hold."""

import pytest

from megatron_patch import cli, cli_prune, errors


def test_usage_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["prune", "--help"]) == errors.EXIT_OK
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli_prune.COMMANDS)
    assert max(map(len, out.splitlines())) <= 120
    assert cli.dispatch(["prune"]) == errors.EXIT_USER
    assert cli.dispatch(["--help"]) == errors.EXIT_OK
    assert f"  prune      {cli_prune.SUMMARY}" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(cli_prune.COMMANDS))
def test_help_of_a_command_has_a_line_and_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.dispatch(["prune", name, "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert f"Example: dsa-upcycle prune {name}" in out


@pytest.mark.parametrize("name", list(cli_prune.COMMANDS))
def test_example_of_a_command_parses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples are what people paste: each must be accepted as it stands."""
    text = cli_prune.COMMANDS[name].__doc__
    example = text[text.index("Example: ") + len("Example: ") :].split()
    called: list[object] = []
    monkeypatch.setattr(cli_prune.COMMANDS[name], "__call__", lambda self: called.append(self))
    assert example[:3] == ["dsa-upcycle", "prune", name]
    cli.dispatch(example[1:])
    assert len(called) == 1
