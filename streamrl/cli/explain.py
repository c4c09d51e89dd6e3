"""``streamrl explain``: the reference of recipe keys, one at a time."""

from __future__ import annotations

from typing import Annotated

from streamrl.cli.command import Argument, Command
from streamrl.rules.explain import explain


class Explain(Command, frozen=True):
    """What a recipe key means, its default and what it may be."""

    key: Annotated[str, Argument("a section, a key, or neither", metavar="SECTION[.KEY]", positional=True)] = ""

    def run(self) -> int:
        """Print it. Raises ``RecipeError`` for a key that nobody has."""
        print("\n".join(explain(self.key)))
        return 0
