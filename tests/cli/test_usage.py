"""Help of every command on one screen, with an example that parses; JSON of every command."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.command import parse_command
from streamrl.cli.help_texts.completion import completion
from streamrl.cli.help_texts.examples import EXAMPLES
from streamrl.cli.main import COMMANDS, load_command, main


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen_and_its_example_parses(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Help of a command fits on one screen and ends with an example that parses."""
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
    assert not parse_command(load_command(name), name, words[count:]).json
    assert parse_command(load_command(name), name, [*words[count:], "--json"]).json


def test_the_outline_fits_a_screen_and_examples_are_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert len(capsys.readouterr().out.splitlines()) <= 50
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.long
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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_has_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert not [name for name in COMMANDS if name.split()[-1] not in text]


def test_bash_completes_commands_flags_and_keys() -> None:
    script = """source /dev/stdin; COMP_WORDS=("${@}"); COMP_CWORD=$(($# - 1))
    $(complete -p streamrl | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo "${COMPREPLY[@]}" """
    for line, found in (
        ("tr", "try train trace"),
        ("reward a", "attach"),
        ("compare recipe.toml --sy", "--systems"),
        ("explain run.st", "run.steps"),
    ):
        words = ["bash", "-c", script, "bash", "streamrl", *line.split()]
        answer = subprocess.run(words, input=completion("bash"), capture_output=True, text=True, check=True, timeout=60)
        assert answer.stdout.split() == found.split(), line
