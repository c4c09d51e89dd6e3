"""Orders of the controller to start, stop and kill engine processes, carried out one after the other.

``launch.pipeline`` receives them from the controller in the process of the command, and passes them to
``EngineOrders``, which calls the supervisor."""

from __future__ import annotations

from logging import getLogger

from anyio import Lock, sleep

from streamrl.base.run_events import KillEngine, StartEngine, StopEngine, SupervisorOrder
from streamrl.processes.launcher import NoHost
from streamrl.processes.supervisor import Supervisor

log = getLogger(__name__)

STARTS = 10
"""Attempts to start an engine where the system has no room for a process, ``START_PAUSE_S`` apart."""
START_PAUSE_S = 1.0


class EngineOrders:
    """Carries out orders about engines with ``supervisor``."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._order_lock = Lock()

    async def handle(self, order: SupervisorOrder) -> None:
        """Carry out ``order``. An engine is started again only when its last process and all descendants are gone. An
        order of a controller that has died meanwhile is ignored. Raises the errors of the supervisor."""
        controller = self._supervisor.controller
        async with self._order_lock:
            if controller is None or not controller.running:
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
        """Start the engines that were retired: a host has joined, and there is room for them again."""
        for name in self._supervisor.retired:
            try:
                self._supervisor.start_engine(name)
            except OSError as error:
                log.error("%s cannot be started now: %s", name, error)

    async def _start(self, name: str) -> None:
        """Start engine ``name``, in several attempts where the system has no room for a process."""
        for _ in range(STARTS - 1):
            try:
                return self._supervisor.start_engine(name)
            except NoHost:
                raise
            except OSError as error:
                log.error("%s cannot be started now: %s", name, error)
                await sleep(START_PAUSE_S)
        return self._supervisor.start_engine(name)

    def _kill(self, order: KillEngine) -> None:
        """End an engine process that makes no progress, by SIGKILL: ``watch`` handles this death like another. A
        successor of the process of ``order`` is not killed."""
        child = self._supervisor.engine_process(order.engine)
        if child is None or not child.running or order.pid not in (0, child.process.pid):
            return
        if order.pid or child.uptime_s >= order.older_than_s:
            log.warning("%s is ended by SIGKILL: %s", order.engine, order.reason)
            child.process.kill()
