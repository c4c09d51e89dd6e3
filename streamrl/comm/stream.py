"""The contract of all streams: three methods and three ways to end. Every process of a run uses it.

A stream carries items of one type from one sender to one receiver, in order, each exactly once.

===============  ==============================================================================
``send(item)``   waits for credit, so a sender is never more than the window ahead of the receiver
``receive()``    waits for the next item
``aclose()``     of the sender: ends the stream after the items sent so far; of the receiver: breaks it
``StreamEnded``  raised by ``receive`` when the sender has closed and every item was received
``StreamClosed`` raised by ``send`` and ``receive`` when this side has closed the stream
``StreamBroken`` raised by ``send`` and ``receive`` when the peer is gone without an end, or broke the protocol
===============  ==============================================================================

Memory streams (``memory_stream``) and ZeroMQ streams (``zmq_stream``) pass the same contract tests.
Cancelling ``receive`` never loses an item."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from anyio import CancelScope, create_task_group

from streamrl.base.errors import StreamBroken, StreamEnded

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class SendStream(Protocol[T_contra]):
    """The sending end."""

    async def send(self, item: T_contra) -> None:
        """Send one item. Raises ``StreamClosed`` or ``StreamBroken``."""

    async def aclose(self) -> None:
        """End the stream: the receiver gets the items sent so far, then ``StreamEnded``. Idempotent."""

    async def watch(self) -> None:
        """Wait until the stream breaks or is closed, and raise ``StreamBroken`` or ``StreamClosed``; never return. A
        caller that sends nothing meanwhile notices the loss of its peer by this."""


class ReceiveStream(Protocol[T_co]):
    """The receiving end. ``async for`` over it stops at ``StreamEnded``."""

    async def receive(self) -> T_co:
        """Wait for the next item and return it. Raises ``StreamEnded``, ``StreamClosed`` or ``StreamBroken``."""

    async def watch(self) -> None:
        """Wait until the stream breaks or is closed, and raise ``StreamBroken`` or ``StreamClosed``; never return. A
        caller that receives nothing meanwhile notices the loss of its peer by this."""

    async def aclose(self) -> None:
        """Stop receiving: the sender gets ``StreamBroken``. Idempotent."""

    def __aiter__(self) -> AsyncIterator[T_co]:
        return self

    async def __anext__(self) -> T_co:
        try:
            return await self.receive()
        except StreamEnded:
            raise StopAsyncIteration from None


class EndedAtExit(ABC):
    """An end of a stream as a context manager: leaving closes it, and leaving with an error breaks the stream.
    ``_role``: name of this end in messages."""

    _role = ""

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            await self.aclose()
        else:
            cause = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else "it was cancelled"
            await self.abort(f"the {self._role} failed: {cause}")

    @abstractmethod
    async def aclose(self) -> None: ...

    @abstractmethod
    async def abort(self, reason: str) -> None:
        """Break the stream: the peer gets ``StreamBroken`` with this reason."""


async def converse(*halves: Callable[[], Awaitable[None]]) -> None:
    """Run ``halves``, which use the streams to and from one peer, side by side until all have ended. When a stream of
    one half breaks, the others are cancelled, and its ``StreamBroken`` is raised, not in an exception group."""
    errors: list[StreamBroken] = []

    async def until_broken(half: Callable[[], Awaitable[None]]) -> None:
        try:
            await half()
        except StreamBroken as error:
            errors.append(error)
            tasks.cancel_scope.cancel()

    async with create_task_group() as tasks:
        for half in halves:
            tasks.start_soon(until_broken, half)
    if errors:
        raise errors[0]


async def send_hello(stream: SendStream[T], orders: ReceiveStream[Any], hello: T) -> None:
    """Send ``hello`` to the controller as the first item of ``stream``. Raises ``StreamBroken`` also when ``orders``,
    the stream from the same controller, breaks first."""
    await exchange_hello(partial(stream.send, hello), orders)


async def exchange_hello(exchange: Callable[[], Awaitable[None]], other: SendStream[Any] | ReceiveStream[Any]) -> None:
    """Send or receive the first item on one of two streams to the same peer. Raises ``StreamBroken`` also when
    ``other`` breaks first: it is connected to a peer that has gone, and the peer's successor would wait for it for
    ever."""

    async def first() -> None:
        await exchange()
        scope.cancel()

    with CancelScope() as scope:
        await converse(first, other.watch)
