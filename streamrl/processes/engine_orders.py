"""What the controller wants of engine hosts, one order after the other; and what its successor finds.

A controller that begins in the midst of a run expects the engines that a run begins with, and knows nothing of whom the
one before it had stopped, or put to sleep.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from typing import Protocol

import anyio

from streamrl.comm.supervisor_orders import KillEngine, StartEngine, StopEngine, SupervisorOrder
from streamrl.config.topology import Role, Topology

log = logging.getLogger(__name__)


class EngineHosts(Protocol):
    """The part of the supervisor that is needed."""

    async def stop_engine(self, name: str, *, patience_s: float = 0.0) -> None: ...

    def start_engine(self, name: str) -> None: ...

    def kill_engine(self, order: KillEngine) -> None: ...


class EngineOrders:
    """``resting``: names of engines that are stopped; it changes with the ``hosts``."""

    def __init__(self, hosts: EngineHosts, topology: Topology, resting: Set[str]) -> None:
        self._hosts, self._resting = hosts, resting
        self._engines = [plan for plan in topology.processes if plan.role is Role.ENGINE]
        self._one = anyio.Lock()
        self._controllers = 0

    async def obey(self, order: SupervisorOrder) -> None:
        """Carry out ``order``: an engine is started again only when its last host and all it started are gone. One that
        waited while another controller was started means nothing any more. Raises as the hosts do."""
        if any(plan.name == order.engine and not plan.local for plan in self._engines):
            log.warning("%s was not started here: whoever did is asked to see to it (%s)", order.engine, order)
            return
        asked_by = self._controllers
        async with self._one:
            if asked_by != self._controllers:
                return
            match order:
                case StopEngine():
                    await self._hosts.stop_engine(order.engine, patience_s=order.patience_s)
                case StartEngine():
                    self._hosts.start_engine(order.engine)
                case KillEngine():
                    self._hosts.kill_engine(order)

    async def start_first_engines(self) -> None:
        """For another controller: when the order in progress was carried out, start what rests and serves at first.

        Where there are sets of engines, every host that runs is ended before: one of another set takes the room, and
        one of the first may be asleep.
        """
        self._controllers += 1
        async with self._one:
            local = [plan for plan in self._engines if plan.local]
            if any(plan.resting for plan in local):
                for plan in local:
                    if plan.name not in self._resting:
                        await self._hosts.stop_engine(plan.name)
            for plan in local:
                if plan.name in self._resting and not plan.resting:
                    self._hosts.start_engine(plan.name)
