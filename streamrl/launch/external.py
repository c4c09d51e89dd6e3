"""``streamrl serve``: an engine host or a trainer rank started by a person or by torchrun, on this host or another.

It runs the same code as a child of the supervisor, but belongs to nobody: it does not die with its parent, and it ends
when its streams end (exit normally) or break (``StreamBroken``)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.launch.roles import role_main
from streamrl.prepare.gpu_demand import gpu_placement
from streamrl.prepare.machine_check import port_problem
from streamrl.prepare.run_length import with_steps_of_epochs
from streamrl.processes.child import ChildContext, run_role
from streamrl.recipe.sections import Recipe, TransportKind
from streamrl.recipe.topology import RENDEZVOUS, Role, plan_topology, rank_host

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def torchrun_rank(environment: Mapping[str, str], ranks: int) -> int | None:
    """The rank that ``torchrun`` gave this process, None where it did not start it. Raises ``RecipeError`` when
    torchrun starts another number of ranks than the recipe has."""
    if not all(environment.get(name) for name in TORCHRUN_VARIABLES):
        return None
    rank = int(environment["RANK"])
    world_size = int(environment["WORLD_SIZE"])
    if world_size != ranks:
        text = (
            f"training.ranks: {ranks}, but torchrun starts {world_size} (nodes times --nproc-per-node): make them equal"
        )
        raise RecipeError(text)
    return rank


def serve_external(role: Role, recipe: Recipe, index: int | None = None, run_directory: Path | None = None) -> None:
    """Run engine or trainer rank ``index`` of ``recipe`` until the run ends. Blocking; for the main thread.

    None: the rank that torchrun gave, else 0. It gets GPUs as if engines, then ranks, filled hosts like this one in
    their order. Trainer ranks under torchrun meet where torchrun says. Ranks of the run in ``run_directory`` go on from
    its newest checkpoint, where it has one.
    Raises ``RecipeError`` when the recipe does not let such a process be started by hand, ``Terminated`` on SIGTERM."""
    counts = {Role.ENGINE: recipe.engines.count, Role.TRAINER: recipe.training.ranks}
    if role not in counts:
        raise RecipeError(f"serve: {role.value} cannot be started by hand; engine and trainer can")
    given = torchrun_rank(os.environ, recipe.training.ranks) if role is Role.TRAINER else None
    if given is not None and index not in (None, given):
        raise RecipeError(f"serve: --index {index}, but torchrun made this process rank {given}: leave --index out")
    index = given if given is not None else index or 0
    if not 0 <= index < counts[role]:
        raise RecipeError(f"serve: {role.value} {index} is not in this recipe: it has 0 to {counts[role] - 1}")
    if recipe.transport.kind is not TransportKind.TCP:
        raise RecipeError(f'transport.kind: {recipe.transport.kind.value} is private to one run; set it to "tcp"')
    if role is Role.TRAINER and (problem := port_problem(host := rank_host(recipe, index), 0)):
        remedy = "start it there, or name the hosts of the ranks in transport.advanced.training_hosts"
        raise RecipeError(f"serve: trainer rank {index} is for {host}, no address of this host ({problem}): {remedy}")
    recipe, _ = with_steps_of_epochs(recipe)
    placement = gpu_placement(recipe, by_hand=True)
    if placement.problems:
        raise RecipeError(*placement.problems)
    socket_directory = Path(tempfile.mkdtemp(prefix="streamrl-"))
    topology = placement.placed(plan_topology(recipe, socket_directory))
    if given is not None:
        # One more place to meet would be one more to get wrong: torchrun already agreed on one.
        topology = msgspec.structs.replace(topology, endpoints=topology.endpoints | {RENDEZVOUS: "env://"})
    try:
        run_role(
            ChildContext(
                plan=next(one for one in topology.processes if (one.role, one.index) == (role, index)),
                recipe=recipe,
                topology=topology,
                run_directory=(run_directory or Path(recipe.run.directory)).resolve(),
                socket_directory=socket_directory,
                resumes=run_directory is not None,
            ),
            role_main(role),
        )
    finally:
        shutil.rmtree(socket_directory, ignore_errors=True)
