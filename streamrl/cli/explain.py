"""``streamrl explain``: the reference of one recipe key, of a section, or of all keys. Runs in the command's own
process."""

from __future__ import annotations

from typing import Annotated

from streamrl.cli.command import Argument, Command
from streamrl.recipe.rules.explain import explain, reference


class Explain(Command, frozen=True):
    """Explain a recipe key: its meaning, its default and its values."""

    key: Annotated[str, Argument("a section, a key, or neither", metavar="SECTION[.KEY]", positional=True)] = ""
    markdown: Annotated[bool, Argument("all keys, as a page of Markdown")] = False

    def run(self) -> int:
        """Print the reference. Raises ``RecipeError`` for an unknown key."""
        lines = reference().splitlines() if self.markdown else explain(self.key)
        return self.print({"key": self.key, "text": lines}, *lines)
