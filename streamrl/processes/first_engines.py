"""Engine hosts for a controller that begins in the midst of a run.

It expects those that a run begins with, and knows nothing of whom the controller before it had stopped, or put to
sleep.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from streamrl.config.topology import Role, Topology


class EngineHosts(Protocol):
    """The part of the supervisor that is needed."""

    async def stop_engine(self, name: str) -> None: ...

    def start_engine(self, name: str) -> None: ...


async def start_first_engines(hosts: EngineHosts, topology: Topology, resting: Set[str]) -> None:
    """Start what rests and serves at first. Where there are sets of engines, every host that runs is ended before: one
    of another set takes the room, and one of the first may be asleep. ``resting``: it changes with the hosts."""
    engines = [plan for plan in topology.processes if plan.role is Role.ENGINE and plan.local]
    if any(plan.resting for plan in engines):
        for plan in engines:
            if plan.name not in resting:
                await hosts.stop_engine(plan.name)
    for plan in engines:
        if plan.name in resting and not plan.resting:
            hosts.start_engine(plan.name)
