"""What the controller wants of engine hosts, one order after the other; and what its successor finds.

A controller that begins in the midst of a run expects the engines that a run begins with, and knows nothing of whom the
one before it had stopped, or put to sleep.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from typing import Protocol

import anyio

from streamrl.plan.topology import Role, Topology
from streamrl.supervise.child_process import FORKLESS_S, ChildProcess
from streamrl.supervise.supervisor_orders import KillEngine, StartEngine, StopEngine, SupervisorOrder

log = logging.getLogger(__name__)

_STARTS = 10  # where the system has no room for a process


class EngineHosts(Protocol):
    """The part of the supervisor that is needed."""

    async def stop_engine(self, name: str, *, patience_s: float = 0.0) -> None: ...

    def start_engine(self, name: str) -> None: ...

    def engine_host(self, name: str) -> ChildProcess | None: ...


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
                    await self._start(order.engine)
                case KillEngine():
                    self._kill(order)

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
                    await self._start(plan.name)

    async def _start(self, name: str) -> None:
        for _ in range(_STARTS - 1):
            try:
                return self._hosts.start_engine(name)
            except OSError as error:
                log.error("%s cannot be started now: %s", name, error)
                await anyio.sleep(FORKLESS_S)
        return self._hosts.start_engine(name)

    def _kill(self, order: KillEngine) -> None:
        """End an engine host that stands still, by SIGKILL: a death like another, which the watch deals with. Another
        host than the one that is meant is left alone."""
        child = self._hosts.engine_host(order.engine)
        if child is None or not child.running or order.pid not in (0, child.process.pid):
            return
        if order.pid or child.lived_s >= order.older_than_s:
            log.warning("%s is ended by SIGKILL: %s", order.engine, order.reason)
            child.process.kill()
