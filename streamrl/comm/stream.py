"""The one stream protocol: four verbs and three outcomes.

A stream carries items of one type from one sender to one receiver, in order, each exactly once.

===============  ==============================================================================
``send(item)``   waits for credit, so a sender is never more than the window ahead of the receiver
``receive()``    waits for the next item
``aclose()``     sender: end of stream, after what was sent; receiver: stop, the sender sees broken
``statistics()`` counters, for the reporter
``StreamEnded``  (receive) the sender closed and everything was received
``StreamClosed`` (send, receive) this side closed it
``StreamBroken`` (send, receive) the peer is gone without an end, or broke the protocol
===============  ==============================================================================

Memory streams (``memory_stream``) and ZeroMQ streams (``zmq_stream``) pass the same contract tests.
Cancelling ``receive`` never loses an item.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

import anyio
import msgspec

from streamrl.base.errors import NobodyCame, StreamBroken

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)
Orders = TypeVar("Orders")
Events = TypeVar("Events")

log = logging.getLogger(__name__)


class StreamStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one end of a stream. ``buffered``: items sent and not yet credited, or received and not yet taken."""

    items: int
    bytes: int
    buffered: int
    window: int
    wait_seconds: float


class SendStream(Protocol[T_contra]):
    """The sending end."""

    async def send(self, item: T_contra) -> None:
        """Send one item. Raises ``StreamClosed`` or ``StreamBroken``."""
        ...

    async def aclose(self) -> None:
        """End the stream: the receiver gets what was sent, then ``StreamEnded``. Idempotent."""
        ...

    def statistics(self) -> StreamStatistics: ...


class WatchedSendStream(SendStream[T_contra], Protocol[T_contra]):
    """A sending end that says when it broke, also to whoever has nothing to send."""

    async def watch(self) -> None:
        """Return never; raise ``StreamBroken``, or ``StreamClosed``."""
        ...


class ReceiveStream(Protocol[T_co]):
    """The receiving end. ``async for`` over it stops at ``StreamEnded``."""

    async def receive(self) -> T_co:
        """The next item. Raises ``StreamEnded``, ``StreamClosed`` or ``StreamBroken``."""
        ...

    async def watch(self) -> None:
        """Return never; raise ``StreamBroken``, or ``StreamClosed``: for whoever waits for no item."""
        ...

    async def aclose(self) -> None:
        """Stop receiving: the sender gets ``StreamBroken``. Idempotent."""
        ...

    def statistics(self) -> StreamStatistics: ...

    def __aiter__(self) -> AsyncIterator[T_co]: ...


async def converse(*halves: Callable[[], Awaitable[None]]) -> None:
    """Run what uses the streams to and from one peer side by side, until all of it has ended.

    Raises ``StreamBroken``, alone and not in a group, when a stream of one half broke: the others are cancelled.
    """
    broken: list[StreamBroken] = []

    async def until_broken(half: Callable[[], Awaitable[None]]) -> None:
        try:
            await half()
        except StreamBroken as error:
            broken.append(error)
            together.cancel_scope.cancel()

    async with anyio.create_task_group() as together:
        for half in halves:
            together.start_soon(until_broken, half)
    if broken:
        raise broken[0]


async def serve_each_controller(
    open_streams: Callable[[], AbstractAsyncContextManager[tuple[Orders, Events]]],
    serve: Callable[[Orders, Events, float], Awaitable[None]],
    stand_still: Callable[[], Awaitable[None]],
    *,
    reconnect_s: float,
) -> None:
    """Serve one controller after another, until one ends its orders. One that is gone before (a stream broke) has a
    successor: ``stand_still``, then wait for it ``reconnect_s`` at most (0: there is none).

    ``serve``: one controller, which must come within so many seconds. Raises what the two raise, and ``StreamBroken``
    (``NobodyCame``) where no controller came.
    """
    within_s = math.inf
    while True:
        try:
            async with open_streams() as (orders, events):
                await serve(orders, events, within_s)
            return
        except StreamBroken as broken:
            if not reconnect_s or isinstance(broken, NobodyCame):
                raise
            log.warning("the controller is gone (%s); waiting for the next one", broken)
        await stand_still()
        within_s = reconnect_s


async def greet(stream: SendStream[T], orders: ReceiveStream[Any], greeting: T, within_s: float) -> None:
    """Send a controller its first item. Raises ``NobodyCame`` where it is not there ``within_s`` (``inf``: whenever it
    likes), and ``StreamBroken`` also when ``orders`` breaks before: that stream had reached a controller that died, and
    the successor, greeted on the other one, would take it for a rank or engine that failed."""

    async def say() -> None:
        await stream.send(greeting)
        said.cancel()

    with anyio.move_on_after(within_s) as waiting, anyio.CancelScope() as said:
        await converse(say, orders.watch)
    if waiting.cancelled_caught:
        raise NobodyCame(f"no controller came within {within_s:g} s after the last one was gone")
