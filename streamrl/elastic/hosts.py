"""Stops and starts the hosts of a pool's engines while the run goes on. On CUDA a host that stops goes to sleep."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import cast

import anyio

from streamrl.base.errors import EngineError, StreamBroken
from streamrl.base.run_events import StartEngine, StopEngine, SupervisorOrder
from streamrl.engines.engine import Engine
from streamrl.engines.pool import EnginePool
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.engines.slots import EngineSlot
from streamrl.recipe.sections import Recipe
from streamrl.vllm.options import installed_device

PATIENCE_SECONDS = 20.0
"""For vLLM to stop when its orders have ended. The supervisor ends what takes longer."""
STOP_SECONDS = 60.0
"""Then, too, the stream of a host that was killed has long been broken."""


class EngineHosts:
    """``order`` reaches the supervisor, whose the processes are. ``sleeps``: a host that is stopped keeps
    its weights in host memory and gives the device's memory back; else its process ends."""

    def __init__(
        self,
        slots: Mapping[str, EngineSlot],
        pool: EnginePool,
        order: Callable[[SupervisorOrder], Awaitable[None]],
        sleeps: bool = False,
    ) -> None:
        self._slots = slots
        self._pool = pool
        self._order = order
        self._sleeps = sleeps
        self._detached: dict[str, Engine] = {}
        self._asleep: dict[str, RemoteEngine] = {}
        self._kv_tokens: dict[str, int] = {}

    def kv_tokens(self, name: str) -> int:
        """Return how many tokens the KV cache of ``name`` holds, which was started here; 0: unknown."""
        return self._kv_tokens.get(name, 0)

    def detach(self, name: str) -> Engine:
        """Leave a drained engine out of the pool. Raises ``EngineError`` while it serves requests."""
        engine = self._detached[name] = self._pool.detach(name)
        return engine

    async def stop(self, name: str) -> None:
        """End the host of ``name``, which was detached, or put it to sleep. Raises ``EngineError`` when it does not
        end."""
        if self._sleeps:
            engine = self._asleep[name] = cast("RemoteEngine", self._detached.pop(name))
            return await engine.sleep()
        await self._order(StopEngine(engine=name, patience_s=PATIENCE_SECONDS))
        try:
            with anyio.fail_after(STOP_SECONDS):
                with suppress(StreamBroken):  # it ended before its orders did: so it is gone, too
                    await self._detached.pop(name).aclose()
                await self._slots[name].wait_closed()
        except TimeoutError as error:
            raise EngineError(f"{name} did not end within {STOP_SECONDS:g} s of being stopped; see its log") from error

    async def start(self, name: str) -> Engine:
        """Wake the host of ``name``, or start one, and wait until it is ready: drained, and with the weights of the
        model directory, or those that it held when it went to sleep.

        Raises ``EngineError`` when it dies meanwhile. Cancelled, the host goes on starting: see ``give_up``.
        """
        if (asleep := self._asleep.get(name)) is not None:
            await asleep.wake()
            await self._pool.attach(name, asleep)
            del self._asleep[name]
            return asleep
        engine = await self._slots[name].open()
        await self._order(StartEngine(engine=name))
        self._kv_tokens[name] = (await self._pool.attach(name, engine)).kv_tokens
        return engine

    async def give_up(self, name: str) -> None:
        """End a host that is starting, at once; one that is waking stays, and ends with the run."""
        if name not in self._asleep:
            await self._order(StopEngine(engine=name))
            await self._slots[name].abandon()

    async def aclose(self) -> None:
        """Close the engines that sleep, which the pool does not close."""
        for engine in self._asleep.values():
            await engine.aclose()


def engine_hosts(
    recipe: Recipe,
    slots: Mapping[str, EngineSlot],
    pool: EnginePool,
    order: Callable[[SupervisorOrder], Awaitable[None]],
) -> EngineHosts:
    """Return those that suit the machine: on a CPU, where vLLM's sleep does nothing, processes end."""
    engines = recipe.engines
    sleeps = bool(engines.sets and engines.sleep_level) and installed_device() != "cpu"
    return EngineHosts(slots, pool, order, sleeps)
