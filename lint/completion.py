"""Completion of shells, made from the commands: ``python lint/completion.py`` writes the files that are shipped."""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

from streamrl.cli.command import add_arguments
from streamrl.cli.main import load_command, outline
from streamrl.cli.usage.completion import COMPLETIONS
from streamrl.recipe.fields import paths_in_view
from streamrl.recipe.sections import Recipe

SHELLS = ("bash", "zsh", "fish")


def completion(shell: str) -> str:
    """The file of ``shell``: commands, flags, choices, files where an argument is a path, keys for ``explain``."""
    return shtab.complete(outline(_fill), shell)


def _fill(name: str, parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, load_command(name))
    for action in parser._actions:  # argparse has no other way to list them
        if action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        if name == "explain" and action.dest == "key":
            action.choices = sorted(paths_in_view(Recipe))


if __name__ == "__main__":
    for shell in SHELLS:
        (COMPLETIONS / f"streamrl.{shell}").write_text(completion(shell))
