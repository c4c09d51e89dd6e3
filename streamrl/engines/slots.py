"""The controller's slots for engine hosts, which may end and be started again while the run goes on."""

from __future__ import annotations

import anyio

from streamrl.base.errors import EngineError
from streamrl.base.messages import EngineEvent, EngineOrder
from streamrl.comm.zmq_sockets import SocketGuard
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.engines.remote_engine import RemoteEngine

WINDOW = 4096


class EngineSlot:
    """Binds the two streams of engine ``name`` anew for each host that takes the slot. ``run`` must run beside it.
    ``guard``: which hosts may connect over tcp.

    To empty it: ``aclose`` of the engine, which ends its host, then ``wait_closed``; or ``abandon``, when the
    supervisor ends the host. To fill it again: ``open``, and a new host at the same endpoints. Each host has streams of
    its own: nothing that one sends late is taken for the next one's.
    """

    def __init__(self, name: str, orders_at: str, completions_at: str, guard: SocketGuard | None = None) -> None:
        self.name = name
        self.death_is_fatal = True
        """Whether the death of a host ends ``run``; else only what waits for its engine hears of it."""
        self._endpoints = orders_at, completions_at
        self._guard = guard
        self._wanted = anyio.Event()
        self._bound = anyio.Event()
        self._closed = anyio.Event()
        self._closed.set()
        self._engine: RemoteEngine | None = None
        self._serving = anyio.CancelScope()
        self._retired = False

    async def run(self) -> None:
        """Serve one host after another until retired. Raises ``EngineError`` naming an engine whose host died, where
        that is fatal."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            try:
                if self._retired:
                    return
                with anyio.CancelScope() as self._serving:
                    await self._serve()
            finally:
                self._engine = None
                self._closed.set()

    async def _serve(self) -> None:
        name, (orders_at, completions_at) = self.name, self._endpoints
        sender = zmq_sender(EngineOrder, orders_at, bind=True, window=WINDOW, guard=self._guard, name=f"{name}.orders")
        receiver = zmq_receiver(
            EngineEvent, completions_at, bind=True, window=WINDOW, guard=self._guard, name=f"{name}.completions"
        )
        async with sender as orders, receiver as completions:
            self._engine = engine = RemoteEngine(name, orders, completions)
            self._bound.set()
            try:
                await engine.run()
            except EngineError:
                if self.death_is_fatal:
                    raise

    @property
    def engine(self) -> RemoteEngine | None:
        """The engine that has the slot, or may take it; None: it is not open."""
        return self._engine

    async def open(self) -> RemoteEngine:
        """Bind the streams; ``start`` of what it returns waits for the host. Raises ``EngineError`` when taken."""
        if not self._closed.is_set():
            raise EngineError(f"{self.name} has a host already; aclose it and wait for its end first")
        self._closed = anyio.Event()
        self._bound = anyio.Event()
        self._wanted.set()
        await self._bound.wait()
        assert self._engine is not None
        return self._engine

    async def wait_closed(self) -> None:
        """Wait until the host ended its stream and the endpoints are free."""
        await self._closed.wait()

    async def abandon(self) -> None:
        """Stop listening to the host: it is being ended, perhaps before it ever was ready."""
        self._serving.cancel()
        await self._closed.wait()

    def retire(self) -> None:
        """Let ``run`` return when the slot is empty: it is not opened again."""
        self._retired = True
        self._wanted.set()
