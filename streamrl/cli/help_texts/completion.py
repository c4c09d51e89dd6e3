"""``streamrl completion``: the completion of a shell, made from the commands at each call in the command's own
process."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated, Literal

import shtab

from streamrl.cli.command import Argument, Command, add_arguments
from streamrl.cli.main import load_command, outline
from streamrl.recipe.field_types import paths_in_view
from streamrl.recipe.sections import Recipe


class PrintCompletion(Command, frozen=True):
    """Print the completion of a shell. Write it into the file that the shell reads:
    bash: ~/.local/share/bash-completion/completions/streamrl, zsh: _streamrl in a directory of $fpath,
    fish: ~/.config/fish/completions/streamrl.fish."""

    shell: Annotated[Literal["bash", "zsh", "fish"], Argument("the shell", positional=True)]

    def run(self) -> int:
        """Print the text. Takes a second or two, since it loads every command."""
        text = completion(self.shell)
        return self.print({"shell": self.shell, "text": text}, text.rstrip())


def completion(shell: str) -> str:
    """Return the completion of ``shell``: commands, flags, choices, files where an argument is a path, and keys."""
    return shtab.complete(outline(_add_command), shell)


def _add_command(name: str, parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, load_command(name))
    for action in parser._actions:  # argparse has no other way to list them
        if action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        if name == "explain" and action.dest == "key":
            action.choices = sorted(paths_in_view(Recipe))
