"""``streamrl serve engine|trainer RECIPE --index i``: one external process of a run, started by a person.

All trainer ranks of a host: ``torchrun --nproc-per-node N -m streamrl serve trainer RECIPE``. For a run that goes on
(``streamrl resume RUN``) its directory stands in place of the recipe: ranks begin from its newest checkpoint.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from streamrl.observe.terminal.printable import log_to
from streamrl.plan.topology import Role
from streamrl.recipe.sections import Recipe
from streamrl.remote.external import serve_external
from streamrl.supervise.child import Terminated


def serve(role: str, recipe: Recipe, index: int | None, run_directory: Path | None = None) -> int:
    """Serve until the run ends; ``run_directory``: of the run that goes on. Exit code 0 also after SIGTERM: an order
    that was obeyed."""
    log_to(sys.stderr, logging.INFO)
    try:
        serve_external(Role(role), recipe, index, run_directory)
    except Terminated:
        return 0
    return 0
