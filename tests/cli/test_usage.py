"""Help of every command on one screen, with an example that parses; JSON of every command."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.command import Command, parse_command
from streamrl.cli.main import COMMANDS, main
from streamrl.cli.usage.examples import EXAMPLES


def kind_of(name: str) -> type[Command]:
    module, _, kind = COMMANDS[name][0].partition(":")
    found: type[Command] = getattr(import_module(f"streamrl.cli.{module}"), kind)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_fits_a_screen_and_ends_with_an_example_that_parses(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main([*name.split(), "--help"])
    assert left.value.code == 0
    lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert lines[-1] == f"example: streamrl {EXAMPLES[name]}", "one line, of a command that has one"
    words = shlex.split(EXAMPLES[name])
    count = len(name.split())
    assert words[:count] == name.split()
    assert not parse_command(kind_of(name), name, words[count:]).json
    assert parse_command(kind_of(name), name, [*words[count:], "--json"]).json


def test_the_outline_fits_a_screen_and_examples_are_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert len(capsys.readouterr().out.splitlines()) <= 50
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["explain", "run.steps"], "key"),
        (["keys", "new"], "roles"),
        (["check"], 0),
        (["train", "r.toml", "--dry-run"], ""),
    ],
)
def test_json_is_all_that_is_on_stdout(
    arguments: list[str], found: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main([*arguments, "--json"])
    out = capsys.readouterr().out
    assert (code, out) == (2, "") if found == "" else json.loads(out)[found]
