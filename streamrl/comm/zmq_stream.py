"""Streams over ZeroMQ: one sender, one receiver, ``ipc`` or ``tcp``; either side may bind.

::

    async with zmq_sender(EngineOrder, "ipc:///run/x/orders", bind=True, window=64, name="orders") as orders:
        await orders.send(Generate(...))

Entering binds, or starts connecting, and returns at once; the first ``send`` or ``receive`` waits for the peer, for as
long as it takes (the supervisor watches the peer's process). The binding side is a ROUTER, the other a DEALER;
``stream_protocol`` decides what they say. A task of the context manager moves messages between socket and memory,
so a cancelled ``send`` or ``receive`` never touches a socket and loses nothing. Leaving normally ends the stream,
leaving with an exception breaks it and tells the peer why. A peer that dies breaks it at once.

Once it is left, the address is free: a new context manager can bind it."""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack

import anyio
from anyio.abc import TaskGroup

from streamrl.base.errors import StreamBroken, StreamClosed, StreamEnded, WireError
from streamrl.base.notifier import SerialGate
from streamrl.base.run_process import RUN_EPOCH
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.stream import ReceiveStream
from streamrl.comm.stream_protocol import Hello, Phase, ReceivingEnd, SendingEnd, StreamRole
from streamrl.comm.wire import HEADER_BYTES, WireCodec, WireLimits
from streamrl.comm.zmq_connection import StreamConnection

T = TypeVar("T")

CLOSE_SECONDS = 5.0
WINDOW = 256

PARTING_SECONDS = 0.5
"""How long an end that breaks or is ended waits for the peer to know. A courtesy: it sees the connection close."""


class StreamOptions(TypedDict, total=False):
    """``window``: items that may be sent and not yet taken (the smaller of both ends counts). ``name``: for messages.
    ``close_seconds``: how long a closing sender waits until the receiver has everything. ``guard``: who may connect, or
    whose address it is; a tcp stream needs one."""

    window: int
    name: str
    limits: WireLimits | None
    close_seconds: float
    guard: KeyGuard | None


class _ZmqStream(ABC, Generic[T]):
    """Common part of sender and receiver: the context manager, waiting for changes, parting."""

    def __init__(self, item_type: Any, endpoint: str, role: StreamRole, bind: bool, options: StreamOptions) -> None:
        self.name = options.get("name") or endpoint
        self._role = role
        self._limits = options.get("limits") or WireLimits()
        self._close_seconds = options.get("close_seconds", CLOSE_SECONDS)
        self._codec: WireCodec[T] = WireCodec(item_type, self._limits)
        window = options.get("window", WINDOW)
        if window < 1:
            raise ValueError(f"stream {self.name!r}: a window of {window} items lets nothing pass; use at least 1")
        self._connection = StreamConnection(
            endpoint, bind=bind, window=window, limits=self._limits, guard=options.get("guard")
        )
        self._hello = Hello(
            item_type=self._codec.item_type_name,
            role=role,
            window=window,
            message_bytes=self._limits.message_bytes,
            session=uuid.uuid4().hex,
            name=options.get("name", ""),
            epoch=int(os.environ.get(RUN_EPOCH) or 0),
        )
        self._tasks: TaskGroup
        self._gate = SerialGate(lambda: self._connection.changed())
        self._closed = False

    @property
    def endpoint(self) -> str:
        """Endpoint of the stream; with the real port after binding ``tcp://HOST:*``."""
        return self._connection.endpoint

    @property
    def unknown_peers(self) -> int:
        """Messages dropped because no handshake with this stream's peer preceded them, or because the sender did not
        speak ZMTP 3."""
        return self._connection.end.unknown_peers

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        self._connection.open()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._connection.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.aclose()
            else:
                cause = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else "it was cancelled"
                await self.abort(f"the {self._role} failed: {cause}")
        finally:
            self._closed = True
            self._connection.stop()
            try:
                # Not told of ``error``: the group would wrap it, and the first error is what the user must see.
                await self._tasks.__aexit__(None, None, None)
            finally:
                self._connection.close()

    @abstractmethod
    async def aclose(self) -> None: ...

    async def abort(self, reason: str) -> None:
        """Break the stream: the peer gets ``StreamBroken`` with this reason."""
        self._closed = True
        self._connection.end.fail(reason)
        self._connection.service()
        self._connection.wake()
        with anyio.CancelScope(shield=True):
            await self._part(PARTING_SECONDS)

    async def watch(self) -> None:
        while True:
            self._raise_if_unusable()
            await self._connection.changed()

    async def _part(self, seconds: float) -> None:
        """Wait until the peer needs nothing more from this end."""
        with anyio.move_on_after(seconds):
            while not self._connection.end.disconnected:
                await self._connection.changed()

    def _describe(self, what: str) -> str:
        return f"stream {self.name!r} ({self._role} at {self._connection.endpoint}): {what}"

    def _raise_if_unusable(self) -> None:
        if self._closed:
            raise StreamClosed(self._describe("was closed by this side"))
        if self._connection.end.phase is Phase.BROKEN:
            raise StreamBroken(self._describe(self._connection.end.reason))


class ZmqSendStream(_ZmqStream[T]):
    """The sending end; make it with ``zmq_sender``. Safe for several coroutines that send at once."""

    def __init__(self, item_type: Any, endpoint: str, *, bind: bool, **options: Unpack[StreamOptions]) -> None:
        super().__init__(item_type, endpoint, StreamRole.SENDER, bind, options)
        self._end = SendingEnd(self._hello, binds=bind, limits=self._limits, transmit=self._connection.transmit)
        self._connection.end = self._end
        self._closing: anyio.Event | None = None

    async def send(self, item: T) -> None:
        """Send one item, waiting for credit. Cancelled, it has not sent. Raises ``WireError`` where the item itself
        cannot travel (the stream goes on), ``StreamClosed`` and ``StreamBroken``."""
        frames = self._codec.encode(item)
        size = sum(len(frame) for frame in frames)
        await self._gate.take(self._has_credit)
        hello = self._end.peer_hello
        if hello is not None and HEADER_BYTES + size > hello.message_bytes:
            most = hello.message_bytes - HEADER_BYTES
            raise WireError(self._describe(f"an item of {size} bytes, the receiver takes at most {most}"))
        self._end.send_item(frames)
        self._connection.service()

    def _has_credit(self) -> bool:
        self._raise_if_unusable()
        return self._end.credit > 0

    async def aclose(self) -> None:
        """End the stream and wait until the receiver has everything, at most ``close_seconds``.

        Raises ``StreamBroken`` where that could not be known. A stream that had broken before is only closed:
        ``send`` is what tells of that. A second closer waits as long: leaving ``async with`` must not
        take the connection from a closer that waits for the receiver's answer."""
        if self._closed:
            if self._closing is not None:
                await self._closing.wait()
            return
        self._closed = True
        self._closing = anyio.Event()
        try:
            await self._end_stream()
        finally:
            self._closing.set()

    async def _end_stream(self) -> None:
        self._connection.wake()
        with anyio.move_on_after(self._close_seconds):
            # An end before the peer came is still an end: it is sent when the peer comes.
            while self._end.phase is Phase.WAITING or (self._end.phase is Phase.OPEN and not self._end.has_credit):
                await self._connection.changed()
        self._end.end()
        if self._end.phase is not Phase.ENDING:
            return
        self._connection.service()
        await self._part(self._close_seconds)
        if not self._end.finished:
            self._end.fail(f"the end was not acknowledged within {self._close_seconds} s")
            lost = self._end.sent - self._end.taken
            raise StreamBroken(self._describe(f"{self._end.reason}; {lost} items may be lost"))


class ZmqReceiveStream(_ZmqStream[T], ReceiveStream[T]):
    """The receiving end; make it with ``zmq_receiver``. ``async for`` over it stops at the end of the stream."""

    def __init__(self, item_type: Any, endpoint: str, *, bind: bool, **options: Unpack[StreamOptions]) -> None:
        super().__init__(item_type, endpoint, StreamRole.RECEIVER, bind, options)
        self._end = ReceivingEnd(self._hello, binds=bind, limits=self._limits, transmit=self._connection.transmit)
        self._connection.end = self._end

    async def receive(self) -> T:
        """The next item. Cancelled, it has taken none. Items that arrived before an end or a break come first. Raises
        ``StreamEnded``, ``StreamClosed`` or ``StreamBroken``."""
        await self._gate.take(self._has_item)
        frames = self._end.items[0]
        try:
            item = self._codec.decode(frames)
            self._end.take()
        except WireError as error:
            self._end.items.clear()
            self._end.fail(str(error))
            raise StreamBroken(self._describe(str(error))) from error
        finally:
            self._connection.service()
        return item

    def _has_item(self) -> bool:
        if self._end.items and not self._closed:
            return True
        if self._end.phase is Phase.ENDED and not self._closed:
            raise StreamEnded(self._describe("the sender ended it and everything was received"))
        self._raise_if_unusable()
        return False

    async def aclose(self) -> None:
        """Stop receiving: the sender gets ``StreamBroken``, unless it had ended the stream."""
        if self._closed:
            return
        if self._end.phase is Phase.ENDED:
            self._closed = True
            self._connection.wake()
            await self._part(PARTING_SECONDS)
        else:
            await self.abort("the receiver closed the stream")


zmq_sender = ZmqSendStream[Any]
"""The sending end of a stream, to be entered with ``async with``. ``item_type`` may be a union of records.

Raises ``StreamRLError`` where the endpoint is none; entering does where it cannot be bound, or where other hosts could
reach it without keys."""

zmq_receiver = ZmqReceiveStream[Any]
"""The receiving end of a stream. Arguments as for ``zmq_sender``."""
