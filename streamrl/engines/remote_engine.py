"""The controller's ``Engine`` for an engine process: it sends orders on one stream and receives events on another.

``elastic.engine_processes`` makes one for each engine process and attaches it to the engine pool. The other end of the
streams is
``engine_process``."""

from __future__ import annotations

import itertools
from asyncio import CancelledError, Future, get_running_loop
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from anyio import Event, move_on_after

from streamrl.base import messages
from streamrl.base.concurrent_calls import retrieve_exception
from streamrl.base.errors import EngineError, RequestRefused, StreamBroken, StreamClosed, StreamEnded, WeightError
from streamrl.base.types import Completion, TextsByName
from streamrl.comm.stream import ReceiveStream, SendStream, exchange_hello

ENGINE_FAILURE = 0
"""Order id of the last message of a failed engine, an ``OrderFailed`` with the reason of the failure."""

CANCEL_SECONDS = 1.0


class RemoteEngine:
    """One engine process. ``run`` must run as a task beside the calls; when it ends, pending calls raise
    ``EngineError``."""

    def __init__(
        self, name: str, orders: SendStream[messages.EngineOrder], events: ReceiveStream[messages.EngineEvent]
    ) -> None:
        self.name = name
        self._orders = orders
        self._events = events
        self._order_ids = itertools.count(ENGINE_FAILURE + 1)
        self._requests: dict[str, Future[Completion]] = {}
        self._pending_orders: dict[int, tuple[Future[messages.OrderDone], type[EngineError | WeightError]]] = {}
        self._ready = Event()
        self.readiness: messages.EngineReady | None = None
        """First message of the engine process, when it was ready."""
        self._load = messages.EngineLoad()
        self.failure = ""
        """Reason why the engine serves no more; empty while it serves."""
        self._closing = False
        self._paused = False
        self._answered = 0
        self.events_received = 0
        """Number of events from the engine process."""
        self.failed = Event()
        """Set when the engine serves no more: see ``failure``."""
        self.lost_requests = 0
        """Number of requests that were open when the engine failed."""

    @property
    def pid(self) -> int:
        """Id of the engine process; 0 before it is ready."""
        return self.readiness.pid if self.readiness else 0

    @property
    def progress(self) -> tuple[int, int, int]:
        """Counters, some of which grow whenever a request makes progress: tokens, decode steps, answers."""
        return self._load.generated_tokens, self._load.decode_steps, self._answered

    @property
    def has_open_requests(self) -> bool:
        """Return whether requests are open and the engine is not paused."""
        return bool(self._requests) and not self._paused

    async def run(self) -> None:
        """Receive events until ``aclose``. Raises ``EngineError`` naming the engine when it died."""
        try:
            await exchange_hello(self._receive_event, self._orders)
            while not self.failure:
                await self._receive_event()
        except (StreamBroken, StreamClosed) as error:
            self.give_up(f"its process is gone: {error}")
        except BaseException:
            self.give_up("the controller stopped listening to it")
            raise
        if not self._closing:
            raise EngineError(self.failure)

    async def start(self) -> messages.EngineReady:
        """Wait for the ``EngineReady`` of the engine process."""
        await self._ready.wait()
        if self.failure or self.readiness is None:
            raise EngineError(self.failure or f"{self.name}: not ready")
        return self.readiness

    async def generate(self, request: messages.Generate) -> Completion:
        """Sample one completion. Raises ``RequestRefused`` or ``EngineError``. Cancelling it aborts the request."""
        self._require_alive()
        if request.request_id in self._requests:
            raise RequestRefused(f"request {request.request_id} is already open; give every request its own id")
        future: Future[Completion] = get_running_loop().create_future()
        self._requests[request.request_id] = future
        try:
            await self._send(request)
            return await future
        except CancelledError:
            with move_on_after(CANCEL_SECONDS, shield=True):
                await self.abort([request.request_id])
            raise
        finally:
            self._requests.pop(request.request_id, None)
            retrieve_exception(future)  # the engine may have died before the request was sent

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ask for requests to stop. The requests of a failed engine have ended already."""
        if not self.failure:
            with suppress(EngineError):
                await self._send(messages.Abort(request_ids=tuple(request_ids)))

    async def pause(self, mode: messages.PauseMode, *, clear_cache: bool) -> None:
        """Stop sampling; returns when the engine has confirmed it."""
        self._paused = True
        await self._call(EngineError, "pause", mode=mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        await self._call(EngineError, "resume")
        self._paused = False

    async def sleep(self) -> None:
        await self._call(EngineError, "sleep")

    async def wake(self) -> None:
        """Take the device's memory again; the live version must be committed before anything is sampled."""
        await self._call(EngineError, "wake")

    async def stage(self, announcement: messages.WeightAnnouncement) -> messages.OrderDone:
        return await self._call(WeightError, "stage", announcement=announcement)

    async def commit(self, policy_version: int) -> messages.OrderDone:
        return await self._call(WeightError, "commit", policy_version=policy_version)

    async def checksums(self) -> TextsByName:
        return (await self._call(EngineError, "checksums")).checksums

    def load(self) -> messages.EngineLoad:
        """Load that the engine process reported last, a fraction of a second ago."""
        return self._load

    async def aclose(self) -> None:
        """End the orders. The engine process then stops its engine and ends, if it has not died before. Idempotent."""
        self._closing = True
        with suppress(StreamBroken):  # the supervisor sees the exit code of the process
            await self._orders.aclose()
        self.give_up("closed")

    async def _call(
        self, error: type[EngineError | WeightError], method: messages.EngineMethod, **arguments: Any
    ) -> messages.OrderDone:
        """Have the engine process call ``method``. Raises ``error`` for a call that failed there."""
        self._require_alive()
        order_id = next(self._order_ids)
        future: Future[messages.OrderDone] = get_running_loop().create_future()
        self._pending_orders[order_id] = future, error
        try:
            await self._send(messages.EngineCall(order_id=order_id, method=method, arguments=arguments))
            return await future
        finally:
            del self._pending_orders[order_id]
            retrieve_exception(future)

    async def _send(self, order: messages.EngineOrder) -> None:
        try:
            await self._orders.send(order)
        except (StreamBroken, StreamClosed) as error:
            self.give_up(f"its process is gone: {error}")
            self._require_alive()

    async def _receive_event(self) -> None:
        try:
            event = await self._events.receive()
        except StreamEnded:
            self.give_up("its process ended the stream of completions")
        else:
            if not self.failure:
                self._accept(event)

    def _accept(self, event: messages.EngineEvent) -> None:
        """Handle an event. An answer to a request or order that has ended already is dropped."""
        self.events_received += 1
        if isinstance(event, messages.Generated):
            self._answered += 1
            _settle(self._requests.get(event.request_id), event.completion)
        elif isinstance(event, messages.GenerationFailed):
            _settle(self._requests.get(event.request_id), RequestRefused(f"{self.name}: {event.reason}"))
        elif isinstance(event, messages.OrderFailed) and event.order_id == ENGINE_FAILURE:
            self.give_up(event.reason)
        elif isinstance(event, messages.OrderDone | messages.OrderFailed):
            future, error = self._pending_orders.get(event.order_id, (None, EngineError))
            if isinstance(event, messages.OrderDone):
                _settle(future, event)
            else:
                _settle(future, error(f"{self.name}: {event.reason}"))
        elif isinstance(event, messages.EngineLoad):
            self._load = event
        elif self.readiness is None:
            self.readiness = event
            self._ready.set()
        else:
            self.give_up("its process said hello twice")

    def give_up(self, reason: str) -> None:
        """Declare the engine dead: every pending call raises ``EngineError``, and later events are dropped."""
        if not self.failure:
            self.lost_requests = len(self._requests)
            self.failure = reason if reason.startswith(f"{self.name}:") else f"{self.name}: {reason}"
        pending: list[Future[Any]] = list(self._requests.values())
        pending += [future for future, _ in self._pending_orders.values()]
        for future in pending:
            _settle(future, EngineError(self.failure))
        self._ready.set()
        self.failed.set()

    def _require_alive(self) -> None:
        if self.failure:
            raise EngineError(self.failure)


def _settle(future: Future[Any] | None, outcome: Any) -> None:
    if future is None or future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
