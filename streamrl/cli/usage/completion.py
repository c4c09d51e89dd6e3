"""``streamrl completion``: the files of ``completions/``, which ``lint/completion.py`` makes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from streamrl.cli.command import Argument, Command

COMPLETIONS = Path(__file__).parent / "completions"


class PrintCompletion(Command, frozen=True):
    """Print the completion of a shell: eval "$(streamrl completion bash)" in ~/.bashrc, or
    streamrl completion fish > ~/.config/fish/completions/streamrl.fish."""

    shell: Annotated[Literal["bash", "zsh", "fish"], Argument("the shell", positional=True)]

    def run(self) -> int:
        """Print it."""
        text = (COMPLETIONS / f"streamrl.{self.shell}").read_text()
        return self.print({"shell": self.shell, "text": text}, text.rstrip())
