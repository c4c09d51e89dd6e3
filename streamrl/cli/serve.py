"""``streamrl serve``: one external process of a run, started by a person."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Literal

from streamrl.app.external import serve_external
from streamrl.cli.command import Argument, Command, Overrides, RecipePath, recipe_file
from streamrl.observe.terminal.printable import log_to
from streamrl.plan.topology import Role
from streamrl.recipe.load import load_recipe
from streamrl.supervise.child import Terminated


class Serve(Command, frozen=True):
    """Serve a run until it ends. All trainer ranks of a host: torchrun --nproc-per-node N -m streamrl serve trainer
    RECIPE. For a run that is resumed give its directory in place of the recipe: ranks start from its newest checkpoint.
    """

    follows_a_run = True
    role: Annotated[Literal["engine", "trainer"], Argument("which", positional=True)]
    recipe: RecipePath
    overrides: Overrides = ()
    index: Annotated[
        int | None, Argument("which engine, or which rank (default: torchrun's RANK, else 0)", metavar="I")
    ] = None

    def run(self) -> int:
        """0 also after SIGTERM: an order that was obeyed."""
        recipe = load_recipe(recipe_file(self.recipe), self.overrides)
        log_to(sys.stderr, logging.INFO)
        try:
            serve_external(Role(self.role), recipe, self.index, self.recipe if self.recipe.is_dir() else None)
        except Terminated:
            return 0
        return 0
