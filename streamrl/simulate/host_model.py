"""Model of the hosts of a simulated fleet: their links, the time of a push to all of them, and the times at which
hosts join or are lost. A fleet file has one (``fleet``); ``host_changes`` reads it during a simulation.

Weights travel as in a run: from the trainer to each host, or in pieces along the chain or tree of the relays of
``engines/push``. The links carry nothing else."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Literal

from msgspec import Struct

from streamrl.engines.push.relay_tree import ancestors, children, pieces_of
from streamrl.recipe.field_types import Natural, NaturalFloat, PositiveFloat

MOST_PIECES = 4096
"""Largest number of pieces of a version in a simulated transfer. A very large version has larger pieces than in a
run."""


class Link(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Link of a host. ``gbit_s``: bandwidth in each direction at the same time; ``latency_s``: latency to any other
    host."""

    gbit_s: PositiveFloat = 10.0
    latency_s: NaturalFloat = 0.0

    def seconds(self, size: float) -> float:
        """Seconds that ``size`` bytes take on the link."""
        return size * 8e-9 / self.gbit_s


class HostChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host joins or is lost. ``at_s``: time of the change; ``host``: number of the host, from 0; numbers from
    ``hosts.count`` on are hosts that join for the first time."""

    at_s: NaturalFloat
    host: Natural
    kind: Literal["join", "loss"]


class HostsModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts that share the engines evenly.

    ``count``: number of hosts at the start (0: hosts are not modelled);
    ``link``: link of each host;
    ``own_links``: links of hosts that differ, by number;
    ``trainer_link``: link of the host that publishes weights;
    ``weights``: "relay", or "direct" for a copy from the trainer to each host;
    ``push_bytes``: size of an encoded version;
    ``apply_s``: seconds from its last byte until the engines of a host have applied it (transfer and application come
      before ``push.seconds``, while engines decode).

    ``changes``: schedule of joins and losses;
    ``loss_every_s``: mean time, in place of a schedule, between two losses of one host (0: no losses);
    ``rejoin_s``: time after which a lost host joins again (0: never);
    ``notice_s``: time from a loss until the requests of the host are submitted elsewhere;
    ``keeps_tokens``: whether they keep all their tokens, or only those of earlier parts, since an engine delivers
      tokens at the end of a part;
    ``start_s``: time from a join until the engines request weights;
    ``join_bytes``: size of these weights, which come from another host or the trainer."""

    count: Natural = 0
    link: Link = Link()
    own_links: dict[str, Link] = {}
    trainer_link: Link = Link()
    weights: Literal["relay", "direct"] = "relay"
    push_bytes: NaturalFloat = 0.0
    apply_s: NaturalFloat = 0.0
    changes: tuple[HostChange, ...] = ()
    loss_every_s: NaturalFloat = 0.0
    rejoin_s: NaturalFloat = 0.0
    notice_s: NaturalFloat = 1.0
    keeps_tokens: bool = True
    start_s: NaturalFloat = 0.0
    join_bytes: NaturalFloat = 0.0

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
        for change in sorted(self.changes, key=lambda change: change.at_s):
            joins = change.kind == "join"
            if (change.host in present) == joins:
                verb = "is" if joins else "is not"
                state = f"{verb} there at {change.at_s:g} s"
                raise ValueError(f"hosts.changes: host {change.host} {state}: remove this {change.kind}")
            present ^= {change.host}
        for name in self.own_links:
            if not name.isdecimal() or int(name) >= self.total:
                raise ValueError(f"hosts.own_links has {name!r}: name hosts by their number, below {self.total}")

    @property
    def total(self) -> int:
        """Number of all hosts, those that join for the first time included."""
        return max([self.count, *(change.host + 1 for change in self.changes)])

    def engines_of(self, host: int, engines: int) -> range:
        """Numbers of the engines of ``host``. The first ``count`` hosts share ``engines`` of them evenly; hosts that
        join for the first time have further ones."""
        if host < self.count:
            return range(-(-host * engines // self.count), -(-(host + 1) * engines // self.count))
        per_host = -(-engines // self.count)
        first = engines + (host - self.count) * per_host
        return range(first, first + per_host)

    def further_engines(self, engines: int) -> int:
        """Number of engines of hosts that join for the first time."""
        further_hosts = self.total - self.count
        if not further_hosts:
            return 0
        return further_hosts * len(self.engines_of(self.count, engines))

    def link_of(self, host: int) -> Link:
        """Link of a host."""
        return self.own_links.get(str(host), self.link)

    def push_s(self, present: Collection[int]) -> float:
        """Seconds from the trainer's first byte until all ``present`` hosts have decoded and applied a version."""
        links = tuple(self.link_of(host) for host in sorted(present))
        if not links or not self.push_bytes:
            return self.apply_s
        return last_byte_s(self.push_bytes, self.trainer_link, links, relays=self.weights == "relay") + self.apply_s

    def join_s(self, host: int, *, alone: bool) -> float:
        """Seconds that the weights take to ``host``, which joins. They come from another host; from the trainer where
        ``host`` is ``alone`` or weights travel directly."""
        source = self.trainer_link if alone or self.weights == "direct" else self.link
        target = self.link_of(host)
        slower = min(source, target, key=lambda link: link.gbit_s)
        return slower.seconds(self.join_bytes) + source.latency_s + target.latency_s


@lru_cache(64)
def last_byte_s(size: float, trainer: Link, links: tuple[Link, ...], *, relays: bool) -> float:
    """Seconds until each of the hosts with these ``links`` has ``size`` bytes. Without ``relays`` all transfers share
    the trainer's link. With relays each host passes a piece on as soon as it has arrived, to as many hosts as the
    relays of a run choose."""
    if not relays:
        shared = max(trainer.seconds(size) * len(links), max(link.seconds(size) for link in links))
        return shared + trainer.latency_s + max(link.latency_s for link in links)
    pieces = min(pieces_of(size), MOST_PIECES)
    width = children(len(links), pieces)
    piece_bytes = size / pieces
    # Places in the tree of relays: -1 is the trainer, place i is the host with links[i].
    children_of: dict[int, list[int]] = {place: [] for place in range(-1, len(links))}
    for place in range(len(links)):
        parent = ancestors(place, width)[0] if place >= width else -1
        children_of[parent].append(place)
    # Times at which each piece has arrived, for places whose children have not been computed, and for leaves.
    arrivals: dict[int, list[float]] = {-1: [0.0] * pieces}
    for place in range(-1, len(links)):
        if children_of[place]:
            source = links[place] if place >= 0 else trainer
            child_links = {child: links[child] for child in children_of[place]}
            arrivals |= _forwarded(arrivals.pop(place), piece_bytes, source, child_links)
    return max(times[-1] for times in arrivals.values())


def _forwarded(
    arrivals: list[float], piece_bytes: float, source: Link, child_links: dict[int, Link]
) -> dict[int, list[float]]:
    """Times at which the pieces that ``source`` has at ``arrivals`` reach each of its children. It sends a piece to one
    child after the other."""
    send_s = source.seconds(piece_bytes)
    receive_s = {child: link.seconds(piece_bytes) for child, link in child_links.items()}
    latency_s = {child: source.latency_s + link.latency_s for child, link in child_links.items()}
    times: dict[int, list[float]] = {child: [] for child in child_links}
    sent_at = 0.0
    received_at = dict.fromkeys(child_links, 0.0)
    for arrival in arrivals:
        for child in child_links:
            sent_at = max(sent_at, arrival) + send_s
            received_at[child] = max(sent_at + latency_s[child], received_at[child] + receive_s[child])
            times[child].append(received_at[child])
    return times
