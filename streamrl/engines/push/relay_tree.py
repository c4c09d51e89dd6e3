"""Choice of the relays that an engine fetches a version of the weights from.

The controller adds the relays to each announcement (``launch.sampling``); an engine process reads its own endpoint
(``launch.roles``); ``streamrl simulate`` uses the same tree. The choice depends on the hosts and on the engines that
take the version.

On each host one engine, the leader, fetches over the network; the relays of the other engines on the host ask the
relay of the leader. The leaders have one order, those beside a trainer rank first, and each leader fetches from an
earlier one, which passes each piece on when it has arrived. A chain takes the time of one copy, and of one piece for
each host; with many hosts and few pieces, a tree with two children a node is faster. The trainer is always the last
source."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.messages import WeightAnnouncement
from streamrl.base.types import Texts, TextsByName
from streamrl.recipe.topology import Role, Topology
from streamrl.weights.requests import CHUNK_BYTES

PEERS = 2
"""Largest number of relays on other hosts that an engine asks before the trainer: its parent and grandparent."""


class RelayPlace(Struct, frozen=True):
    """The host of an engine, and the endpoint of its relay. ``beside_trainer``: whether a trainer rank is on this
    host."""

    host: str
    endpoint: str
    beside_trainer: bool = False


def relay_endpoint(topology: Topology, name: str) -> str:
    """Return the endpoint of the relay of the engine ``name``; empty when it has none, or all engines are on one
    host."""
    place = relay_places(topology).get(name)
    if place is None:
        return ""
    return place.endpoint


def relay_places(topology: Topology) -> dict[str, RelayPlace]:
    """Return the relays of the engines on hosts with an address, by engine. Empty when there is only one such host."""
    trainer_hosts = {plan.host for plan in topology.processes if plan.role is Role.TRAINER}
    places = {}
    for plan in topology.processes:
        if plan.role is Role.ENGINE and plan.address:
            endpoint = topology.endpoints.get(f"{plan.name}.weights")
            if endpoint:
                places[plan.name] = RelayPlace(plan.host, endpoint, plan.host in trainer_hosts)
    hosts = {place.host for place in places.values()}
    if len(hosts) <= 1:
        return {}
    return places


class RelayTree:
    """Adds relays to announcements. ``read_places``: function that returns the relays by engine. If there are any, it
    is called again when an engine joins, since the engine may be on another host than before."""

    def __init__(self, read_places: Callable[[], Mapping[str, RelayPlace]]) -> None:
        self._read_places = read_places
        self._set_places(read_places())

    def _set_places(self, places: Mapping[str, RelayPlace]) -> None:
        self._order = sorted(places, key=lambda name: (not places[name].beside_trainer, places[name].host))
        self._places = places

    def with_relays(self, announced: WeightAnnouncement, name: str, engines: Collection[str]) -> WeightAnnouncement:
        """Return the announcement of a version to the engine ``name``, with its relays. ``engines``: engines that take
        the version at this time, or, for an engine that joins and is not among them, engines that hold it."""
        if self._places and name not in engines:
            self._set_places(self._read_places())
        if name not in self._places:
            return announced
        pieces = sum(pieces_of(source.payload_bytes) for source in announced.sources)
        sources = self.sources(name, engines, pieces)
        return replace(announced, peers=tuple(self._places[source].endpoint for source in sources))

    def sources(self, name: str, engines: Collection[str], pieces: int) -> Texts:
        """Return the engines that ``name`` asks for a version before it asks the trainer, in order. ``pieces``: number
        of pieces of the version."""
        leaders: TextsByName = {}  # by host
        for engine in self._order:
            if engine in engines:
                leaders.setdefault(self._places[engine].host, engine)
        host = self._places[name].host
        leader = leaders.get(host, name)
        on_this_host: list[str] = []
        if leader != name:
            on_this_host.append(leader)
        if name not in engines:
            # All leaders hold the version: prefer the nearest ones before this engine in the order.
            remote = [leaders[other] for other in leaders if other != host]
            before = sum(self._order.index(engine) < self._order.index(name) for engine in remote)
            nearest_last = remote[before:] + remote[:before]
            return *on_this_host, *reversed(nearest_last[-PEERS:])
        chain = list(leaders.values())
        above = ancestors(chain.index(leader), children(len(chain), pieces))
        return *on_this_host, *(chain[position] for position in above[:PEERS])


def pieces_of(size: float) -> int:
    """Return the number of pieces in which ``size`` bytes of a version are sent."""
    return ceil(size / CHUNK_BYTES)


def children(hosts: int, pieces: int) -> int:
    """Return the number of hosts that each host sends to, 1 or 2, with which the last host has all ``pieces`` first. A
    link is assumed to carry as much out as in, so two copies take twice the time of one."""
    levels = max(1, ceil(math.log2(hosts / 2 + 1)))
    return 1 if pieces + hosts - 1 <= 2 * (pieces + levels - 1) else 2


def ancestors(position: int, width: int) -> Sequence[int]:
    """Return the positions above ``position`` in a tree, the nearest first. Each node, and the root (the trainer, which
    has no position), has ``width`` children."""
    above = []
    while position >= width:
        position = (position - width) // width
        above.append(position)
    return above
