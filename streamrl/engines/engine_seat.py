"""The controller's places for engine hosts, which may be stopped and started again while the run goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import cast

import anyio

from streamrl.base.errors import EngineError, StreamBroken
from streamrl.base.messages import EngineEvent, EngineOrder
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.engines.engine import Engine
from streamrl.engines.engine_pool import EnginePool
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.recipe.sections import Recipe
from streamrl.remote.transport_keys import KeyRole
from streamrl.supervise.supervisor_orders import StartEngine, StopEngine, SupervisorOrder
from streamrl.vllm.options import installed_device

PATIENCE_SECONDS = 20.0
"""For vLLM to stop when its orders have ended. The supervisor ends what takes longer."""
STOP_SECONDS = 60.0
"""Then, too, the stream of a host that was killed has long been broken."""


class EngineSeat:
    """Binds the two streams of ``name`` anew for each host that takes the seat. ``run`` must run beside it.

    To empty it: ``aclose`` of the engine, which ends its host, then ``emptied``; or ``abandon``, when somebody else
    ends the host. To fill it again: ``open``, and a new host at the same endpoints. Each host has streams of its own:
    nothing that one said late is heard by whoever listens to the next.

    ``died``: told of the engine whose host died, and of why, at once; without it a death ends ``run``.
    """

    def __init__(
        self,
        name: str,
        orders_at: str,
        completions_at: str,
        *,
        window: int = 4096,
        died: Callable[[RemoteEngine, str], None] | None = None,
    ) -> None:
        self._name = name
        self.died = died
        self._orders_at = orders_at
        self._completions_at = completions_at
        self._window = window
        self._wanted = anyio.Event()
        self._taken = anyio.Event()
        self._left = anyio.Event()
        self._left.set()
        self._engine: RemoteEngine | None = None
        self._serving = anyio.CancelScope()
        self._retired = False

    async def run(self) -> None:
        """Serve one host after another until retired. Raises ``EngineError`` naming the engine when a host died and
        nobody is there who is told."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            if self._retired:
                self._left.set()
                return
            try:
                with anyio.CancelScope() as self._serving:
                    await self._serve()
            finally:
                self._engine = None
                self._left.set()  # whoever waits for its end waits for nothing more, however it ended

    async def _serve(self) -> None:
        async with (
            zmq_sender(
                EngineOrder,
                self._orders_at,
                bind=True,
                window=self._window,
                name=f"{self._name}.orders",
                peer_role=KeyRole.ENGINE,
            ) as orders,
            zmq_receiver(
                EngineEvent,
                self._completions_at,
                bind=True,
                window=self._window,
                name=f"{self._name}.completions",
                peer_role=KeyRole.ENGINE,
            ) as completions,
        ):
            self._engine = engine = RemoteEngine(self._name, orders, completions)
            self._taken.set()
            try:
                await engine.run()
            except EngineError as error:
                if self.died is None:
                    raise
                self.died(engine, str(error))

    @property
    def engine(self) -> RemoteEngine | None:
        """Who has the seat, or may take it; None: it is not open."""
        return self._engine

    async def open(self) -> RemoteEngine:
        """Bind the streams; ``start`` of what it returns waits for the host. Raises ``EngineError`` when taken."""
        if not self._left.is_set():
            raise EngineError(f"{self._name} has a host already; aclose it and wait for its end first")
        self._left = anyio.Event()
        self._taken = anyio.Event()
        self._wanted.set()
        await self._taken.wait()
        assert self._engine is not None
        return self._engine

    async def emptied(self) -> None:
        """Wait until the host ended its stream and the endpoints are free."""
        await self._left.wait()

    async def abandon(self) -> None:
        """Listen to the host no more, whatever it does: it is being ended, perhaps before it ever was ready."""
        self._serving.cancel()
        await self._left.wait()

    def retire(self) -> None:
        """Nobody will take the seat again: ``run`` returns when it is empty."""
        self._retired = True
        self._wanted.set()


class SeatedEngines:
    """Stops and starts the hosts of a pool's engines. ``tell`` reaches the supervisor, whose the processes are."""

    def __init__(
        self,
        seats: Mapping[str, EngineSeat],
        pool: EnginePool,
        tell: Callable[[SupervisorOrder], Awaitable[None]],
    ) -> None:
        self._seats = seats
        self._pool = pool
        self._tell = tell
        self._left: dict[str, Engine] = {}
        self._kv_tokens: dict[str, int] = {}

    def kv_tokens(self, name: str) -> int:
        """Tokens that the KV cache of ``name`` holds, which was started here; 0: unknown."""
        return self._kv_tokens.get(name, 0)

    def detach(self, name: str) -> Engine:
        """Leave a drained engine out of the pool. Raises ``EngineError`` while it serves requests."""
        engine = self._left[name] = self._pool.detach(name)
        return engine

    async def stop(self, name: str) -> None:
        """End the host of ``name``, which was detached. Raises ``EngineError`` when it does not end."""
        await self._tell(StopEngine(engine=name, patience_s=PATIENCE_SECONDS))
        try:
            with anyio.fail_after(STOP_SECONDS):
                with suppress(StreamBroken):  # it ended before it was told to: so it is gone, too
                    await self._left.pop(name).aclose()
                await self._seats[name].emptied()
        except TimeoutError as error:
            raise EngineError(f"{name} did not end within {STOP_SECONDS:g} s of being told; see its log") from error

    async def start(self, name: str) -> Engine:
        """Start a host for ``name`` and wait until it is ready: drained, and with the weights of the model directory.

        Raises ``EngineError`` when it dies meanwhile. Cancelled, the host goes on starting: see ``give_up``.
        """
        engine = await self._seats[name].open()
        await self._tell(StartEngine(engine=name))
        self._kv_tokens[name] = (await self._pool.attach(name, engine)).kv_tokens
        return engine

    async def give_up(self, name: str) -> None:
        """End a host that is starting, at once."""
        await self._tell(StopEngine(engine=name))
        await self._seats[name].abandon()

    async def aclose(self) -> None:
        """The run ends: nothing is left that the pool does not close."""


def seated_engines(
    recipe: Recipe,
    seats: Mapping[str, EngineSeat],
    pool: EnginePool,
    tell: Callable[[SupervisorOrder], Awaitable[None]],
) -> SeatedEngines:
    """Those that suit the machine: on a CPU, where vLLM's sleep does nothing, processes end."""
    level = recipe.engines.sleep_level
    if recipe.engines.sets and level and installed_device() != "cpu":
        return SleepingEngines(seats, pool, tell, level)
    return SeatedEngines(seats, pool, tell)


class SleepingEngines(SeatedEngines):
    """On CUDA: a host that is not needed goes on, asleep at vLLM's ``level``, and gives the device's memory back. Where
    there is no host yet, one is started."""

    def __init__(
        self,
        seats: Mapping[str, EngineSeat],
        pool: EnginePool,
        tell: Callable[[SupervisorOrder], Awaitable[None]],
        level: int,
    ) -> None:
        super().__init__(seats, pool, tell)
        self._level = level
        self._asleep: dict[str, RemoteEngine] = {}

    async def stop(self, name: str) -> None:
        """Put the host of ``name``, which was detached, to sleep."""
        engine = self._asleep[name] = cast("RemoteEngine", self._left.pop(name))
        await engine.sleep(self._level)

    async def start(self, name: str) -> Engine:
        """Wake the host of ``name``, or start one: drained, and with the weights that it held, if any."""
        engine = self._asleep.get(name)
        if engine is None:
            return await super().start(name)
        await engine.wake()
        await self._pool.attach(name, engine)
        del self._asleep[name]
        return engine

    async def give_up(self, name: str) -> None:
        """End a host that is starting; one that is waking stays, and ends with the run."""
        if name not in self._asleep:
            await super().give_up(name)

    async def aclose(self) -> None:
        """The run ends, and who sleeps with it."""
        for engine in self._asleep.values():
            await engine.aclose()
