"""Orders of the controller about engine hosts, carried out one after the other."""

from __future__ import annotations

import logging

import anyio

from streamrl.base.run_events import KillEngine, StartEngine, StopEngine, SupervisorOrder
from streamrl.processes.launcher import NoHost
from streamrl.processes.supervisor import Supervisor
from streamrl.recipe.topology import Role

log = logging.getLogger(__name__)

# where the system has no room for a process
STARTS = 10
START_PAUSE_S = 1.0


class EngineOrders:
    """Orders to the ``supervisor``."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._elsewhere = [p.name for p in supervisor.topology.processes if p.role is Role.ENGINE and not p.local]
        self._one = anyio.Lock()

    async def handle(self, order: SupervisorOrder) -> None:
        """Carry out ``order``: an engine is started again only when its last host and all it started are gone. An order
        of a controller that died before it was its turn means nothing any more. Raises as the supervisor does."""
        if order.engine in self._elsewhere:
            log.warning("%s was not started here: the person who did has to see to it (%s)", order.engine, order)
            return
        asked_by = self._supervisor.controller
        async with self._one:
            if asked_by is None or not asked_by.running:
                return
            match order:
                case StopEngine():
                    await self._supervisor.stop_engine(order.engine, patience_s=order.patience_s, sleeps=order.sleeps)
                case StartEngine():
                    try:
                        await self._start(order.engine)
                    except NoHost as error:
                        log.error("%s cannot be started now: %s", order.engine, error)
                case KillEngine():
                    self._kill(order)

    def start_retired(self) -> None:
        """Start the engines that were given up: there is room for them again."""
        for name in self._supervisor.retired:
            try:
                self._supervisor.start_engine(name)
            except OSError as error:
                log.error("%s cannot be started now: %s", name, error)

    async def _start(self, name: str) -> None:
        for _ in range(STARTS - 1):
            try:
                return self._supervisor.start_engine(name)
            except NoHost:
                raise
            except OSError as error:
                log.error("%s cannot be started now: %s", name, error)
                await anyio.sleep(START_PAUSE_S)
        return self._supervisor.start_engine(name)

    def _kill(self, order: KillEngine) -> None:
        """End an engine host that makes no progress, by SIGKILL: a death like another, which the watch deals with.
        Another host than the one that is meant is left alone."""
        child = self._supervisor.engine_host(order.engine)
        if child is None or not child.running or order.pid not in (0, child.process.pid):
            return
        if order.pid or child.uptime_s >= order.older_than_s:
            log.warning("%s is ended by SIGKILL: %s", order.engine, order.reason)
            child.process.kill()
