"""``streamrl serve`` and ``keys``: processes of a run that a person starts, on other hosts too, and who is let in."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from streamrl.base.printable import log_to
from streamrl.cli.command import Argument, Command, Overrides, RecipePath, recipe_file
from streamrl.comm.transport_keys import KeyRole, make_keys
from streamrl.launch.external import serve_external
from streamrl.prepare.hub.resolution import with_hub_folders
from streamrl.processes.child import Terminated
from streamrl.recipe.rules.load import load_recipe
from streamrl.recipe.topology import Role


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
        recipe = with_hub_folders(load_recipe(recipe_file(self.recipe), self.overrides))
        log_to(sys.stderr, logging.INFO)
        ending = "stopped"
        with suppress(Terminated):
            serve_external(Role(self.role), recipe, self.index, self.recipe if self.recipe.is_dir() else None)
            ending = "served"
        return self.print({"role": self.role, "ended": ending}) if self.json else 0


class Keys(Command, frozen=True):
    """Make a pair of CURVE keys for each role, in a directory that only you may enter."""

    directory: Annotated[Path, Argument("a new directory", metavar="DIRECTORY", positional=True)]

    def run(self) -> int:
        """Make them, and say which process needs which. No key is printed."""
        make_keys(self.directory)
        roles = [role.value for role in KeyRole]
        return self.print(
            {"directory": str(self.directory), "roles": roles},
            f"{self.directory}: keys of {', '.join(roles)}; only you may read them",
            f'set transport.keys = "{self.directory}" in the recipe (transport.kind = "tcp")',
            "another host needs all *.public files and the *.secret of what it runs, in a directory of mode 700:",
            "  engine.secret for `streamrl serve engine`, trainer.secret for `streamrl serve trainer`,",
            "  observer.secret for `streamrl watch --keys DIRECTORY`; controller.secret stays with the run",
        )
