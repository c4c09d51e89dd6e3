"""Decides which relays an engine is to fetch a version from, in a pure function of hosts and of who takes the version.

Of each host one engine, its leader, fetches over the network; the relays of the host's other engines ask the leader's.
Leaders stand in one order, those beside a trainer rank first, and each fetches from one before it, piece by piece as
the pieces come. A chain takes the time of one copy and of one piece for each host; where hosts are many and pieces few,
a tree with two children each is faster. The trainer is always the last source."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from streamrl.base.messages import WeightAnnouncement
from streamrl.recipe.topology import Role, Topology
from streamrl.weights.requests import CHUNK_BYTES

PEERS = 2
"""Relays of other hosts that an engine is named before the trainer: the one above it, and the next one up."""


class RelayPlace(msgspec.Struct, frozen=True):
    """The host of an engine, and the endpoint of its relay. ``beside_trainer``: a trainer rank is on that host."""

    host: str
    endpoint: str
    beside_trainer: bool = False


def relay_endpoint(topology: Topology, name: str) -> str:
    """Endpoint at which the engine ``name`` relays weights; empty where it has none, or no other host is there."""
    places = relay_places(topology)
    return places[name].endpoint if name in places else ""


def relay_places(topology: Topology) -> dict[str, RelayPlace]:
    """Engines of hosts with an address, by name. Empty where there is but one such host."""
    trainers = {plan.host for plan in topology.processes if plan.role is Role.TRAINER}
    places = {
        plan.name: RelayPlace(plan.host, endpoint, plan.host in trainers)
        for plan in topology.processes
        if plan.role is Role.ENGINE and plan.address and (endpoint := topology.endpoints.get(f"{plan.name}.weights"))
    }
    return places if len({place.host for place in places.values()}) > 1 else {}


class RelayTree:
    """Names the relays of an announcement. ``places``: returns those of the engines that have one, by name; it is
    called again where there are some and an engine joins, since it may be on another host than before."""

    def __init__(self, places: Callable[[], Mapping[str, RelayPlace]]) -> None:
        self._read = places
        self._use(places())

    def _use(self, places: Mapping[str, RelayPlace]) -> None:
        self._order = sorted(places, key=lambda name: (not places[name].beside_trainer, places[name].host))
        self._places = places

    def routed(self, announced: WeightAnnouncement, name: str, engines: Collection[str]) -> WeightAnnouncement:
        """The announcement to ``name`` of a version that ``engines`` take at this time, or hold where ``name`` is none
        of them (it joins)."""
        if self._places and name not in engines:
            self._use(self._read())
        if name not in self._places:
            return announced
        pieces = sum(pieces_of(source.payload_bytes) for source in announced.sources)
        names = self.sources(name, engines, pieces)
        return msgspec.structs.replace(announced, peers=tuple(self._places[one].endpoint for one in names))

    def sources(self, name: str, engines: Collection[str], pieces: int) -> tuple[str, ...]:
        """Engines that ``name`` asks for a version of so many ``pieces``, in order, and then the trainer."""
        leaders: dict[str, str] = {}
        for one in self._order:
            if one in engines:
                leaders.setdefault(self._places[one].host, one)
        own = leaders.get(host := self._places[name].host, name)
        on_this_host = () if own == name else (own,)
        if name not in engines:
            others = [leader for of, leader in leaders.items() if of != host]
            before = sum(self._order.index(leader) < self._order.index(name) for leader in others)
            return *on_this_host, *reversed([*others[before:], *others[:before]][-PEERS:])
        chain = list(leaders.values())
        above = ancestors(chain.index(own), children(len(chain), pieces))
        return *on_this_host, *(chain[place] for place in above[:PEERS])


def pieces_of(size: float) -> int:
    """Return the number of pieces in which ``size`` bytes of a version travel."""
    return math.ceil(size / CHUNK_BYTES)


def children(hosts: int, pieces: int) -> int:
    """Return how many hosts each host sends to, 1 or 2: by which the last has all ``pieces`` first. Links are taken to
    carry as much out as in, so that two copies take twice as long as one."""
    levels = max(1, math.ceil(math.log2(hosts / 2 + 1)))
    return 1 if pieces + hosts - 1 <= 2 * (pieces + levels - 1) else 2


def ancestors(place: int, width: int) -> Sequence[int]:
    """Places above ``place`` in a tree whose nodes, and its root (the trainer, which is not listed), have ``width``
    children; the nearest first."""
    above = []
    while place >= width:
        place = (place - width) // width
        above.append(place)
    return above
