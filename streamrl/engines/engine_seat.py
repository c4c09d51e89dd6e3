"""The controller's place for an engine host that may be stopped and started again while the run goes on."""

from __future__ import annotations

import anyio

from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.errors import EngineError
from streamrl.messages import EngineEvent, EngineOrder


class EngineSeat:
    """Binds the two streams of ``name`` anew for each host that takes the seat. ``run`` must run beside it.

    To empty it: ``aclose`` of the engine, which ends its host, then ``emptied``. To fill it again: ``open``, and a new
    host at the same endpoints.
    """

    def __init__(self, name: str, orders_at: str, completions_at: str, *, window: int = 4096) -> None:
        self._name = name
        self._orders_at = orders_at
        self._completions_at = completions_at
        self._window = window
        self._wanted = anyio.Event()
        self._taken = anyio.Event()
        self._left = anyio.Event()
        self._left.set()
        self._engine: RemoteEngine | None = None

    async def run(self) -> None:
        """Serve one host after another until cancelled. Raises ``EngineError`` naming the engine when a host died."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            async with (
                zmq_sender(
                    EngineOrder, self._orders_at, bind=True, window=self._window, name=f"{self._name}.orders"
                ) as orders,
                zmq_receiver(
                    EngineEvent, self._completions_at, bind=True, window=self._window, name=f"{self._name}.completions"
                ) as completions,
            ):
                self._engine = RemoteEngine(self._name, orders, completions)
                self._taken.set()
                await self._engine.run()
            self._engine = None
            self._left.set()

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
