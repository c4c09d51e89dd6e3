"""Ways of a version from a trainer rank to an engine: decided here alone, by the location of both.

The dry run asks for the locations that a topology plans, vLLM's workers for their own and the ranks'."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from pathlib import Path

from msgspec import Struct

from streamrl.base.messages import WeightAnnouncement


class Mover(StrEnum):
    """Way of a version. ``DEVICE``: the rank's memory on the same GPU. ``HOST``: the rank's memory on the same host.
    ``ENCODED``: encoded bytes, through a socket or a store."""

    DEVICE = "device"
    HOST = "host"
    ENCODED = "encoded"


class Location(Struct, frozen=True):
    """Location of a process. ``host``: name of the host. ``device``: name of the only GPU that the process uses (empty:
    none, or several)."""

    host: str
    device: str = ""


NOWHERE = Location("")
"""A place that is near to no other."""


def mover_between(rank: Location, engine: Location) -> Mover:
    """Return the mover of a rank that shares its memory, to one worker of an engine."""
    if not engine.host or rank.host != engine.host:
        return Mover.ENCODED
    return Mover.DEVICE if rank.device and rank.device == engine.device else Mover.HOST


def farthest(movers: Iterable[Mover]) -> Mover:
    """Return the mover of a version. ``movers``: movers of the parts, of which the version takes the slowest."""
    return max(movers, key=list(Mover).index, default=Mover.ENCODED)


def mover_of(announced: WeightAnnouncement, engine: Location) -> Mover:
    """Return the mover of an announced version to a worker at ``engine``."""
    movers = []
    for source in announced.sources:
        memory = source.memory
        movers.append(Mover.ENCODED if memory is None else mover_between(Location(memory.host, memory.device), engine))
    return farthest(movers)


@cache
def this_host() -> str:
    """Return the identity of this host's start and table of processes. Processes with the same identity can open each
    other's memory, where the system lets them; the empty text is the identity of no host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # another system than Linux
        return ""
