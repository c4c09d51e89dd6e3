"""The one stream protocol: three verbs and three outcomes.

A stream carries items of one type from one sender to one receiver, in order, each exactly once.

===============  ==============================================================================
``send(item)``   waits for credit, so a sender is never more than the window ahead of the receiver
``receive()``    waits for the next item
``aclose()``     sender: end of stream, after what was sent; receiver: stop, the sender sees broken
``StreamEnded``  (receive) the sender closed and everything was received
``StreamClosed`` (send, receive) this side closed it
``StreamBroken`` (send, receive) the peer is gone without an end, or broke the protocol
===============  ==============================================================================

Memory streams (``memory_stream``) and ZeroMQ streams (``zmq_stream``) pass the same contract tests.
Cancelling ``receive`` never loses an item."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio

from streamrl.base.errors import StreamBroken, StreamEnded

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class SendStream(Protocol[T_contra]):
    """The sending end."""

    async def send(self, item: T_contra) -> None:
        """Send one item. Raises ``StreamClosed`` or ``StreamBroken``."""
        ...

    async def aclose(self) -> None:
        """End the stream: the receiver gets what was sent, then ``StreamEnded``. Idempotent."""
        ...

    async def watch(self) -> None:
        """Return never; raise ``StreamBroken``, or ``StreamClosed``: for a caller that sends nothing meanwhile."""
        ...


class ReceiveStream(Protocol[T_co]):
    """The receiving end. ``async for`` over it stops at ``StreamEnded``."""

    async def receive(self) -> T_co:
        """The next item. Raises ``StreamEnded``, ``StreamClosed`` or ``StreamBroken``."""
        ...

    async def watch(self) -> None:
        """Return never; raise ``StreamBroken``, or ``StreamClosed``: for a caller that waits for no item."""
        ...

    async def aclose(self) -> None:
        """Stop receiving: the sender gets ``StreamBroken``. Idempotent."""
        ...

    def __aiter__(self) -> AsyncIterator[T_co]:
        return self

    async def __anext__(self) -> T_co:
        try:
            return await self.receive()
        except StreamEnded:
            raise StopAsyncIteration from None


async def converse(*halves: Callable[[], Awaitable[None]]) -> None:
    """Run what uses the streams to and from one peer side by side, until all of it has ended. Raises ``StreamBroken``,
    alone and not in a group, when a stream of one half broke: the others are cancelled."""
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


async def send_hello(stream: SendStream[T], orders: ReceiveStream[Any], hello: T) -> None:
    """Send a controller its first item. Raises ``StreamBroken`` also when ``orders`` breaks before."""
    await exchange_hello(partial(stream.send, hello), orders)


async def exchange_hello(exchange: Callable[[], Awaitable[None]], other: SendStream[Any] | ReceiveStream[Any]) -> None:
    """Send or receive the first item on one of two streams to the same peer. Raises ``StreamBroken`` also when the
    other one breaks before: it had reached a peer that is gone, and its successor would wait at it for ever."""

    async def first() -> None:
        await exchange()
        done.cancel()

    with anyio.CancelScope() as done:
        await converse(first, other.watch)
