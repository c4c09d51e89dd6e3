"""Assignment of the engines and trainer ranks of a run on the hosts of a cluster. Pure.

``cluster_launcher`` calls it in the supervisor's process: before processes are started, and each time before they are
started again. A dry run calls it for its lines, in the process of the command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec
from msgspec import structs

from streamrl.base.errors import RecipeError
from streamrl.base.types import Texts
from streamrl.recipe.rules.rules import broken_rules
from streamrl.recipe.sections import EngineKind, Recipe
from streamrl.recipe.topology import ProcessPlace, prepared_sets


class HostRoom(msgspec.Struct, frozen=True, kw_only=True):
    """A host that may get processes, with its capacity. ``gpus``: names of the GPUs that the run may use there."""

    name: str
    address: str
    gpus: Texts = ()


class GpuNeed(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of each worker of an engine, and of each trainer rank; 0: they compute on the CPU."""

    engine: int
    rank: int


def gpu_need(recipe: Recipe, device: str) -> GpuNeed:
    """GPUs that each process needs where the installed packages compute on ``device`` (``cuda``, ``cpu``)."""
    on_gpu = device != "cpu"
    return GpuNeed(
        engine=int(on_gpu and recipe.engines.kind is EngineKind.VLLM),
        rank=int(on_gpu and recipe.training.device != "cpu"),
    )


def assign(recipe: Recipe, hosts: Sequence[HostRoom], need: GpuNeed) -> dict[str, ProcessPlace]:
    """Place each engine and rank, by name. ``hosts``: hosts of the cluster, the host of the controller first.

    Ranks are on the fewest hosts that hold them, or on ``cluster.trainer_hosts`` hosts; successive ranks share a host.
    Engines are on the hosts without ranks, or on all hosts where too few are without. Raises ``RecipeError`` with the
    arithmetic where there are too few hosts or GPUs."""
    cluster = recipe.cluster
    minimum = max(cluster.hosts, cluster.trainer_hosts, cluster.engine_hosts, 1)
    if len(hosts) < minimum:
        raise RecipeError(
            f"cluster: {minimum} hosts are asked for, and there are {len(hosts)}{_listed(hosts)}: start Ray on more "
            "hosts, or ask for fewer"
        )
    free = {host.name: list(host.gpus) for host in hosts}
    ranks = [f"trainer-{index}" for index in range(recipe.training.ranks)]
    rank_hosts = _hosts_of_ranks(hosts, len(ranks), need.rank, cluster.trainer_hosts)
    places = dict(_shared_out(ranks, rank_hosts, need.rank, free))
    other_hosts = [host for host in hosts if host not in rank_hosts]
    for engine_set in prepared_sets(recipe):
        # Sets of engines run alternately: each may use all GPUs without a rank.
        width = engine_set.workers * need.engine
        free_for_set = {name: list(gpus) for name, gpus in free.items()}
        engine_hosts = _hosts_of_engines(
            [*other_hosts, *rank_hosts], len(other_hosts), engine_set.count, width, cluster.engine_hosts, free_for_set
        )
        places |= _shared_out(engine_set.engines, engine_hosts, width, free_for_set)
        missing = [name for name in (*ranks, *engine_set.engines) if name not in places]
        if missing:
            names = ", ".join(missing[:3])
            if len(missing) > 3:
                names += " ..."
            gpus = sum(len(host.gpus) for host in hosts)
            raise RecipeError(
                f"cluster: {engine_set.count} engines of {width} and {len(ranks)} ranks of {need.rank} need "
                f"{engine_set.count * width + len(ranks) * need.rank} GPUs, and {gpus} are free{_listed(hosts)}; no "
                f"room for {names} (an engine is on one host): lower "
                "engines.count, engines.tensor_parallel_size, engines.args.pipeline_parallel_size or training.ranks, "
                "or give Ray more hosts"
            )
    return places


def on_fewer_ranks(recipe: Recipe, hosts: Sequence[HostRoom], need: GpuNeed) -> Recipe | None:
    """Return ``recipe`` with as many of its ranks as have room on ``hosts``; None where no rank has room. The launcher
    asks after hosts were lost, so the numbers of hosts in ``[cluster]`` are not required of the result."""
    for ranks in range(recipe.training.ranks, 0, -1):
        fewer = structs.replace(
            recipe,
            training=structs.replace(recipe.training, ranks=ranks),
            cluster=structs.replace(recipe.cluster, hosts=0, trainer_hosts=0, engine_hosts=0),
        )
        with suppress(RecipeError):
            assign(fewer, hosts, need)
            if not list(broken_rules(fewer)):
                return fewer
    return None


def _listed(hosts: Sequence[HostRoom]) -> str:
    """The hosts with their GPUs, in parentheses, for the text of an error."""
    if not hosts:
        return ""
    descriptions = [f"{host.name}: {len(host.gpus)} GPUs" if host.gpus else host.name for host in hosts]
    return f" ({', '.join(descriptions)})"


def _hosts_of_ranks(hosts: Sequence[HostRoom], ranks: int, width: int, host_count: int) -> list[HostRoom]:
    """The hosts for ``ranks`` ranks of ``width`` GPUs each. ``host_count``: number of hosts; 0: as few as possible."""
    if not width:
        return list(hosts[: host_count or 1])
    if host_count:
        ranks_per_host = -(-ranks // host_count)  # rounded up
        return [host for host in hosts if len(host.gpus) >= ranks_per_host * width][:host_count]
    # The fewest hosts: largest first. The sort is stable, so the controller's host comes first among equals.
    rank_hosts: list[HostRoom] = []
    for host in sorted(hosts, key=lambda host: -len(host.gpus)):
        if sum(len(rank_host.gpus) for rank_host in rank_hosts) < ranks * width:
            rank_hosts.append(host)
    return sorted(rank_hosts, key=hosts.index)


def _hosts_of_engines(
    hosts: Sequence[HostRoom], preferred: int, engines: int, width: int, host_count: int, free: dict[str, list[str]]
) -> list[HostRoom]:
    """The first ``host_count`` hosts where this is set; else the first ``preferred`` hosts where they have room for all
    engines; else all hosts."""
    if host_count:
        return list(hosts[:host_count])
    preferred_hosts = list(hosts[:preferred])
    room = sum(len(free[host.name]) // width for host in preferred_hosts) if width else engines
    return preferred_hosts if preferred_hosts and room >= engines else list(hosts)


def _shared_out(
    names: Sequence[str], hosts: Sequence[HostRoom], width: int, free: dict[str, list[str]]
) -> Iterator[tuple[str, ProcessPlace]]:
    """Spread ``names`` evenly over ``hosts``, as far as the GPUs in ``free`` suffice, and remove these GPUs from it."""
    waiting = list(names)
    for number, host in enumerate(hosts):
        count = -(-len(waiting) // (len(hosts) - number))  # an even part, rounded up
        if width:
            # This host takes more than an even part where later hosts have too few GPUs for theirs.
            later_room = sum(len(free[later_host.name]) // width for later_host in hosts[number + 1 :])
            count = min(max(count, len(waiting) - later_room), len(free[host.name]) // width)
        for name in waiting[:count]:
            gpus = tuple(free[host.name][:width])
            free[host.name][:width] = []
            yield name, ProcessPlace(host=host.name, address=host.address, gpus=gpus)
        del waiting[:count]
