"""The launcher of a recipe: processes on this host, or on the hosts of a cluster. ``launch.pipeline`` and the commands
call it in the process of the command."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from streamrl.comm.transport_keys import CLUSTER_KEYS, make_keys
from streamrl.processes.cluster.cluster_launcher import SaveRecipe, assignment_lines, cluster_launcher, host_line
from streamrl.processes.cluster.ray_hosts import ray_hosts
from streamrl.processes.launcher import Launcher
from streamrl.processes.local_launcher import ENTRY, LocalLauncher
from streamrl.recipe.sections import Recipe, TransportSecurity
from streamrl.recipe.topology import Topology


@asynccontextmanager
async def open_launcher(
    recipe: Recipe, run_directory: Path, sockets: Path, save: SaveRecipe
) -> AsyncIterator[Launcher]:
    """Open the launcher for a run of ``recipe``. On a cluster this starts daemons on its hosts, and makes keys for the
    run.
    ``save``: writes the recipe of a run on a cluster that goes on with fewer ranks or on other hosts. Raises
    ``RecipeError`` where the cluster cannot be reached or is too small."""
    local = LocalLauncher((sys.executable, *ENTRY), run_directory, sockets)
    if recipe.on_one_host:
        yield local
        return
    keys = run_directory / CLUSTER_KEYS
    if not recipe.transport.keys and recipe.transport.security is not TransportSecurity.NONE and not keys.exists():
        make_keys(keys)
    async with (
        ray_hosts(recipe.cluster, recipe.transport) as hosts,
        cluster_launcher(recipe, run_directory, sockets, hosts, local, save) as launcher,
    ):
        yield launcher


async def hosts_of(recipe: Recipe) -> list[str]:
    """One line for each host of the cluster of ``recipe``, with the processes that it would get; empty without a
    cluster. Raises ``RecipeError`` where the cluster cannot be reached or is too small."""
    if recipe.on_one_host:
        return []
    async with ray_hosts(recipe.cluster, recipe.transport) as hosts:
        return assignment_lines(recipe, await hosts.offers())


def placed_lines(topology: Topology) -> list[str]:
    """One line for each host of a cluster, with its processes; empty on one host."""
    hosts = {plan.host: plan.address for plan in topology.processes if plan.host}
    return [
        host_line(host, address, (plan.name for plan in topology.processes if plan.host == host))
        for host, address in hosts.items()
    ]
