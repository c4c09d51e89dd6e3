"""The movers that a run's topology plans: how versions get from the trainer ranks to the engines. ``launch.roles``
gives them to each rank; the dry run prints them."""

from __future__ import annotations

from msgspec.structs import replace

from streamrl.recipe.sections import Recipe
from streamrl.recipe.topology import ProcessPlan, Role, Topology
from streamrl.weights.distance import Location, Mover, farthest, mover_between

_TEXTS = {
    Mover.DEVICE: "from the trainer's memory on the same GPU",
    Mover.HOST: "from the trainer's memory on the same host",
    Mover.ENCODED: "as encoded bytes",
}


def movers_of(recipe: Recipe, topology: Topology) -> dict[str, Mover]:
    """Return the mover of a version to each engine, by the name of the engine: of its ranks the slowest, since a worker
    takes all parts of a version one way. It decides again by where it really is (``weights.distance``)."""
    ranks = [plan for plan in topology.processes if plan.role is Role.TRAINER]
    engines = [plan for plan in topology.processes if plan.role is Role.ENGINE]
    return {engine.name: farthest(_mover(recipe, rank, engine) for rank in ranks) for engine in engines}


def mover_lines(recipe: Recipe, topology: Topology) -> list[str]:
    """One line for each mover, with its engines."""
    engines: dict[Mover, list[str]] = {}
    for name, mover in movers_of(recipe, topology).items():
        engines.setdefault(mover, []).append(name)
    return [f"  weights get to {', '.join(names)} {_TEXTS[mover]}" for mover, names in engines.items()]


def _mover(recipe: Recipe, rank: ProcessPlan, engine: ProcessPlan) -> Mover:
    shares = recipe.weights.shared_memory
    if shares is None:
        shares = bool(rank.gpus) and not recipe.weights.transport
    if not shares:
        return Mover.ENCODED
    place = _location(rank)
    if recipe.in_turns:  # the rank's memory on the GPU is free when the engines fetch
        place = replace(place, device="")
    return mover_between(place, _location(engine))


def _location(plan: ProcessPlan) -> Location:
    return Location(plan.host or "the host of the run", ",".join(plan.gpus))
