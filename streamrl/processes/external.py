"""``streamrl serve``: an engine host or a trainer rank started by a person, on this host or another.

It runs the same code as a child of the supervisor, but belongs to nobody: it does not die with its parent, and it ends
when its streams end (exit normally) or break (``StreamBroken``).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from streamrl.config.recipe import Recipe, TransportKind
from streamrl.config.topology import ProcessPlan, Role, plan_topology
from streamrl.errors import RecipeError
from streamrl.processes.child import ChildContext, run_role


def serve_external(role: Role, recipe: Recipe, index: int) -> None:
    """Run engine or trainer rank ``index`` of ``recipe`` until the run ends. Blocking; for the main thread.

    Raises ``RecipeError`` when the recipe does not let such a process be started by hand, ``Terminated`` on SIGTERM.
    """
    counts = {Role.ENGINE: recipe.engines.count, Role.TRAINER: recipe.training.ranks}
    if role not in counts:
        raise RecipeError([f"serve: {role.value} cannot be started by hand; engine and trainer can"])
    if not 0 <= index < counts[role]:
        raise RecipeError([f"serve: {role.value} {index} is not in this recipe: it has 0 to {counts[role] - 1}"])
    if recipe.transport.kind is not TransportKind.TCP:
        raise RecipeError([f'transport.kind: {recipe.transport.kind.value} is private to one run; set it to "tcp"'])
    socket_directory = Path(tempfile.mkdtemp(prefix="streamrl-"))
    try:
        run_role(
            ChildContext(
                plan=ProcessPlan(role=role, index=index, local=False),
                recipe=recipe,
                topology=plan_topology(recipe, socket_directory),
                run_directory=Path(recipe.run.directory),
                socket_directory=socket_directory,
            )
        )
    finally:
        shutil.rmtree(socket_directory, ignore_errors=True)
