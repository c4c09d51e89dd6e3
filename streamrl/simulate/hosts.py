"""Hosts of a simulated cluster: their links, how long a version takes to all of them, and when some join or are lost.

Weights travel as they do in a run: from the trainer to each host, or by the chain or tree of ``engines/push``'s relays,
piece by piece. Nothing else is on the links."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Annotated, Literal

import msgspec

from streamrl.engines.push.relay_tree import ancestors, children, pieces_of

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
MOST_PIECES = 4096
"""Of a version in a simulated transfer: of a larger one they are larger than those of a run."""


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``gbit_s`` each way at the same time; ``latency_s`` from this end to any other."""

    gbit_s: Positive = 10.0
    latency_s: NotNegative = 0.0

    def seconds(self, size: float) -> float:
        """Time that so many bytes take on it."""
        return size * 8e-9 / self.gbit_s


class HostChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``host`` (from 0; numbers from ``hosts.count`` on are further ones) joins or is lost at ``at_s``."""

    at_s: NotNegative
    host: Annotated[int, msgspec.Meta(ge=0)]
    kind: Literal["join", "loss"]


class HostsModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``count`` hosts (0: not modelled) that share the engines evenly. ``link``: of each, ``own_links``: of those that
    differ, by number; ``trainer_link``: of the host that publishes.

    ``weights``: "relay" or "direct" (a copy from the trainer to each host). ``push_bytes``: of an encoded version;
    ``apply_s``: from its last byte until a host's engines have it; both beside ``push.seconds``, while engines decode.

    ``changes``: a schedule; or ``loss_every_s``: mean time between two losses of one host (0: never), of which each
    joins again ``rejoin_s`` later (0: never). ``notice_s``: from a loss until its requests are submitted elsewhere,
    with the tokens that they had when ``keeps_tokens`` (else with those of earlier parts: an engine gives tokens at the
    end of a part). ``start_s``: from a join until its engines ask for weights, ``join_bytes`` from a host that has
    them, or the trainer."""

    count: Annotated[int, msgspec.Meta(ge=0)] = 0
    link: Link = Link()
    own_links: dict[str, Link] = {}
    trainer_link: Link = Link()
    weights: Literal["relay", "direct"] = "relay"
    push_bytes: NotNegative = 0.0
    apply_s: NotNegative = 0.0
    changes: tuple[HostChange, ...] = ()
    loss_every_s: NotNegative = 0.0
    rejoin_s: NotNegative = 0.0
    notice_s: NotNegative = 1.0
    keeps_tokens: bool = True
    start_s: NotNegative = 0.0
    join_bytes: NotNegative = 0.0

    def __post_init__(self) -> None:
        if not self.count and (self.push_bytes or self.apply_s or self.changes or self.loss_every_s):
            raise ValueError("hosts.count is 0 and other keys of hosts are given: set hosts.count to 1 or more")
        if self.changes and self.loss_every_s:
            raise ValueError("hosts.changes and hosts.loss_every_s are both given: keep a schedule, or a rate")
        if self.rejoin_s and not self.loss_every_s:
            raise ValueError(
                "hosts.rejoin_s needs hosts.loss_every_s: in a schedule a host joins by a change of its own"
            )
        present = set(range(self.count))
        for one in sorted(self.changes, key=lambda change: change.at_s):
            if (one.host in present) == (one.kind == "join"):
                state = f"{'is' if one.kind == 'join' else 'is not'} there at {one.at_s:g} s"
                raise ValueError(f"hosts.changes: host {one.host} {state}: remove this {one.kind}")
            present ^= {one.host}
        for name in self.own_links:
            if not name.isdecimal() or int(name) >= self.most:
                raise ValueError(f"hosts.own_links has {name!r}: name hosts by their number, below {self.most}")

    @property
    def most(self) -> int:
        """Number of hosts, those that join for the first time included."""
        return max([self.count, *(change.host + 1 for change in self.changes)])

    def engines_of(self, host: int, engines: int) -> range:
        """Numbers of a host's engines, of ``engines`` on the first ``count`` hosts."""
        if host < self.count:
            return range(-(-host * engines // self.count), -(-(host + 1) * engines // self.count))
        each = -(-engines // self.count)
        return range(engines + (host - self.count) * each, engines + (host - self.count + 1) * each)

    def further_engines(self, engines: int) -> int:
        """Number of engines of hosts that join for the first time."""
        further = self.most - self.count
        return further and further * len(self.engines_of(self.count, engines))

    def link_of(self, host: int) -> Link:
        """Link of a host."""
        return self.own_links.get(str(host), self.link)

    def push_s(self, present: Collection[int]) -> float:
        """Seconds from the trainer's first byte until all ``present`` hosts have a version, decoded and applied."""
        links = tuple(self.link_of(host) for host in sorted(present))
        if not links or not self.push_bytes:
            return self.apply_s
        return last_byte_s(self.push_bytes, self.trainer_link, links, relays=self.weights == "relay") + self.apply_s

    def join_s(self, host: int, *, alone: bool) -> float:
        """Seconds that the weights take to ``host``, which joins: from another, or from the trainer where it is
        ``alone`` or weights travel directly."""
        source = self.trainer_link if alone or self.weights == "direct" else self.link
        own = self.link_of(host)
        slower = min(source, own, key=lambda link: link.gbit_s)
        return slower.seconds(self.join_bytes) + source.latency_s + own.latency_s


@lru_cache(64)
def last_byte_s(size: float, trainer: Link, links: tuple[Link, ...], *, relays: bool) -> float:
    """Seconds until each of the hosts with these ``links`` has ``size`` bytes. Directly, the trainer's link is shared;
    by relays each host sends a piece on once it has it, to as many hosts as the relays of a run choose."""
    if not relays:
        shared = max(trainer.seconds(size) * len(links), max(link.seconds(size) for link in links))
        return shared + trainer.latency_s + max(link.latency_s for link in links)
    pieces = min(pieces_of(size), MOST_PIECES)
    width = children(len(links), pieces)
    piece = size / pieces
    below: dict[int, list[int]] = {place: [] for place in range(-1, len(links))}
    for place in range(len(links)):
        below[ancestors(place, width)[0] if place >= width else -1].append(place)
    has: dict[int, list[float]] = {-1: [0.0] * pieces}
    for place in range(-1, len(links)):
        source = links[place] if place >= 0 else trainer
        sends = source.seconds(piece)
        takes = {child: links[child].seconds(piece) for child in below[place]}
        latency = {child: source.latency_s + links[child].latency_s for child in below[place]}
        free = 0.0
        got = dict.fromkeys(below[place], 0.0)
        times = {child: list[float]() for child in below[place]}
        for at in has.pop(place) if below[place] else ():
            for child in below[place]:
                free = max(free, at) + sends
                got[child] = max(free + latency[child], got[child] + takes[child])
                times[child].append(got[child])
        has |= times
    return max(times[-1] for place, times in has.items() if place >= 0)
