"""Keeps engines that are behind on a weight push away from requests, until they hold what the others hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine

import anyio
from anyio.abc import TaskGroup

from streamrl.base.nursery import start_unless_ending
from streamrl.engines.engine_pool import LOST, EnginePool

log = logging.getLogger(__name__)


class PoolService:
    """An ``EngineService`` (``control.publisher``) over the engines of a pool. ``run`` must run beside the pushes."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._group: TaskGroup | None = None

    async def run(self) -> None:
        """What catches up runs as a child of this, until it is cancelled."""
        async with anyio.create_task_group() as self._group:
            await anyio.sleep_forever()

    async def take_out(self, engine: object, reason: str) -> None:
        """Drain it. Raises ``EngineError`` when no other engine serves."""
        name = self._name_of(engine)
        if name is not None:
            log.warning("%s leaves service until it holds the live weights: %s", name, reason)
            await self._pool.drain(name)

    async def take_back(self, engine: object) -> None:
        """Readmit it."""
        name = self._name_of(engine)
        if name is not None:
            log.warning("%s serves: it holds the live weights", name)
            for by in ("", LOST):
                self._pool.readmit(name, by=by)

    def lost(self, engine: object, reason: str) -> bool:
        """``engine`` does not answer, or cannot serve any more. Whether the run goes on without it."""
        return False

    def beside(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run ``work`` as a child of ``run``."""
        assert self._group is not None, "run() was not started"
        start_unless_ending(self._group, work)

    def _name_of(self, engine: object) -> str | None:
        """None: it was lost meanwhile."""
        return next((name for name, attached in self._pool.attached.items() if attached is engine), None)
