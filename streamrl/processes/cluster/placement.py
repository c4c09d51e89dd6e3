"""Which host of a cluster each engine and trainer rank of a run gets. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.recipe.rules.rules import broken_rules
from streamrl.recipe.sections import EngineKind, Recipe
from streamrl.recipe.topology import ProcessPlace, prepared_sets


class HostRoom(msgspec.Struct, frozen=True, kw_only=True):
    """A host that may get processes. ``gpus``: names of those that the run may use there."""

    name: str
    address: str
    gpus: tuple[str, ...] = ()


class GpuNeed(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of each engine and of each trainer rank of a recipe; 0: they compute on the CPU."""

    engine: int
    rank: int


def gpu_need(recipe: Recipe, device: str) -> GpuNeed:
    """GPUs that each process needs where the installed packages compute on ``device`` (``cuda``, ``cpu``)."""
    on_gpu = device != "cpu"
    width = max(one.workers for one in prepared_sets(recipe))
    return GpuNeed(
        engine=width * (on_gpu and recipe.engines.kind is EngineKind.VLLM),
        rank=int(on_gpu and recipe.training.device != "cpu"),
    )


def assign(recipe: Recipe, hosts: Sequence[HostRoom], need: GpuNeed) -> dict[str, ProcessPlace]:
    """The place of each engine and rank, by name. ``hosts``: that of the controller first.

    Ranks are on the fewest hosts that hold them, or on ``cluster.trainer_hosts``, those that follow each other on one
    host; engines on the hosts without ranks, or on all where there are none or not enough. Raises ``RecipeError``
    with the arithmetic where there are too few hosts or GPUs."""
    wanted = recipe.cluster
    least = max(wanted.hosts, wanted.trainer_hosts, wanted.engine_hosts, 1)
    if len(hosts) < least:
        raise RecipeError(
            f"cluster: {least} hosts are asked for, and there are {len(hosts)}{_listed(hosts)}: start Ray on more "
            "hosts, or ask for fewer"
        )
    free = {host.name: list(host.gpus) for host in hosts}
    ranks = [f"trainer-{index}" for index in range(recipe.training.ranks)]
    with_ranks = _hosts_of_ranks(hosts, len(ranks), need.rank, wanted.trainer_hosts)
    places = dict(_shared_out(ranks, with_ranks, need.rank, free))
    without = [host for host in hosts if host not in with_ranks]
    for one in prepared_sets(recipe):
        # Sets of engines take turns, so each has all GPUs that the ranks leave.
        left = {name: list(gpus) for name, gpus in free.items()}
        chosen = _hosts_of_engines(
            [*without, *with_ranks], len(without), one.count, need.engine, wanted.engine_hosts, left
        )
        places |= _shared_out(one.engines, chosen, need.engine, left)
    if missing := [name for name in (*ranks, *_engines(recipe)) if name not in places]:
        gpus = sum(len(host.gpus) for host in hosts)
        engines = len(_engines(recipe)[: recipe.engines.count])
        raise RecipeError(
            f"cluster: {engines} engines of {need.engine} and {len(ranks)} ranks of {need.rank} need "
            f"{engines * need.engine + len(ranks) * need.rank} GPUs, and {gpus} are free{_listed(hosts)}; no room for "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''} (an engine is on one host): lower "
            "engines.count, engines.tensor_parallel_size, engines.args.pipeline_parallel_size or training.ranks, or "
            "give Ray more hosts"
        )
    return places


def on_fewer_ranks(recipe: Recipe, hosts: Sequence[HostRoom], need: GpuNeed) -> Recipe | None:
    """``recipe`` with as many of its ranks as there is room for on any of ``hosts``; None where there is for none."""
    for ranks in range(recipe.training.ranks, 0, -1):
        fewer = msgspec.structs.replace(
            recipe,
            training=msgspec.structs.replace(recipe.training, ranks=ranks),
            cluster=msgspec.structs.replace(recipe.cluster, hosts=0, trainer_hosts=0, engine_hosts=0),
        )
        with suppress(RecipeError):
            assign(fewer, hosts, need)
            if not list(broken_rules(fewer)):
                return fewer
    return None


def _engines(recipe: Recipe) -> list[str]:
    return [name for one in prepared_sets(recipe) for name in one.engines]


def _listed(hosts: Sequence[HostRoom]) -> str:
    if not hosts:
        return ""
    return f" ({', '.join(f'{host.name}: {len(host.gpus)} GPUs' if host.gpus else host.name for host in hosts)})"


def _hosts_of_ranks(hosts: Sequence[HostRoom], ranks: int, width: int, asked: int) -> list[HostRoom]:
    if not width:
        return list(hosts[: asked or 1])
    if asked:
        each = -(-ranks // asked)
        return [host for host in hosts if len(host.gpus) >= each * width][:asked]
    # The fewest: largest first. The sort is stable, so the controller's host comes first among equals.
    chosen: list[HostRoom] = []
    for host in sorted(hosts, key=lambda host: -len(host.gpus)):
        if sum(len(one.gpus) for one in chosen) < ranks * width:
            chosen.append(host)
    return sorted(chosen, key=hosts.index)


def _hosts_of_engines(
    hosts: Sequence[HostRoom], preferred: int, engines: int, width: int, asked: int, free: dict[str, list[str]]
) -> list[HostRoom]:
    """The first ``asked``; else the first ``preferred`` where they have room for all engines; else all."""
    first = list(hosts[: asked or preferred])
    room = sum(len(free[host.name]) // width for host in first) if width else engines
    return first if asked or (first and room >= engines) else list(hosts)


def _shared_out(
    names: Sequence[str], hosts: Sequence[HostRoom], width: int, free: dict[str, list[str]]
) -> Iterator[tuple[str, ProcessPlace]]:
    """Place ``names`` host after host, evenly, as far as the GPUs suffice, which are taken from ``free``."""
    waiting = list(names)
    for number, host in enumerate(hosts):
        here = -(-len(waiting) // (len(hosts) - number))
        if width:
            # Others have fewer GPUs than their even part: then this host takes more.
            others = sum(len(free[one.name]) // width for one in hosts[number + 1 :])
            here = min(max(here, len(waiting) - others), len(free[host.name]) // width)
        for name in waiting[:here]:
            gpus = tuple(free[host.name][:width])
            free[host.name][:width] = []
            yield name, ProcessPlace(host=host.name, address=host.address, gpus=gpus)
        del waiting[:here]
