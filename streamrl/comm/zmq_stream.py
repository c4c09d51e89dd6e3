"""Streams between processes over ZeroMQ: one sender, one receiver, ``ipc`` or ``tcp``; either side may bind. The
processes of a run send each other orders and events by them; weights have sockets of their own.

::

    async with zmq_sender(EngineOrder, "ipc:///run/x/orders", bind=True, window=64, name="orders") as orders:
        await orders.send(Generate(...))

Entering binds, or starts connecting, and returns at once. The first ``send`` or ``receive`` waits for the peer without
a time limit (the supervisor watches the peer's process). The binding side is a ROUTER, the other side a DEALER;
``stream_protocol`` has their messages. A task of the context manager moves messages between socket and memory, so a
cancelled ``send`` or ``receive`` never touches a socket and loses nothing. Leaving normally ends the stream; leaving
with an exception breaks it and sends the reason to the peer. The death of the peer breaks the stream at once.

After leaving, the address is free: a new context manager can bind it."""

from __future__ import annotations

import uuid
from os import environ
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack

from anyio import CancelScope, Event, create_task_group, move_on_after
from anyio.abc import TaskGroup

from streamrl.base.errors import StreamBroken, StreamClosed, StreamEnded, WireError
from streamrl.base.notifier import SerialGate
from streamrl.base.run_process import RUN_EPOCH
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.stream import EndedAtExit, ReceiveStream
from streamrl.comm.stream_protocol import Hello, Phase, ReceivingEnd, SendingEnd, StreamRole
from streamrl.comm.wire import HEADER_BYTES, WireCodec, WireLimits
from streamrl.comm.zmq_connection import StreamConnection

T = TypeVar("T")

CLOSE_SECONDS = 5.0
WINDOW = 256

PARTING_SECONDS = 0.5
"""Longest wait for the peer to disconnect after this side has broken the stream, or has acknowledged its end. A peer
that does not get the last message still notices that the connection closes."""


class StreamOptions(TypedDict, total=False):
    """Options of a stream.

    ``window``: items that may be sent and not yet taken; the smaller window of both ends counts. ``name``: name of the
    stream in messages. ``limits``: sizes of messages. ``close_seconds``: longest wait of a closing sender until the
    receiver has everything. ``guard``: check of the peer's keys; a tcp stream needs one."""

    window: int
    name: str
    limits: WireLimits | None
    close_seconds: float
    guard: KeyGuard | None


class _ZmqStream(EndedAtExit, Generic[T]):
    """Common part of sender and receiver: the context manager, waiting for changes, closing."""

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
            epoch=int(environ.get(RUN_EPOCH) or 0),
        )
        self._tasks: TaskGroup
        self._gate = SerialGate(lambda: self._connection.changed())  # one send or receive at a time, in order of calls
        self._closed = False

    @property
    def endpoint(self) -> str:
        """Endpoint of the stream; with the real port after binding ``tcp://HOST:*``."""
        return self._connection.endpoint

    @property
    def unknown_peers(self) -> int:
        """Messages ignored because another process than the peer sent them, or because their sender did not speak ZMTP
        3."""
        return self._connection.end.unknown_peers

    async def __aenter__(self) -> Self:
        self._tasks = create_task_group()
        self._connection.open()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._connection.run)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            await super().__aexit__(kind, error, traceback)
        finally:
            self._closed = True
            self._connection.stop()
            try:
                # Without ``error``: the task group would wrap it, and the user must see the first error itself.
                await self._tasks.__aexit__(None, None, None)
            finally:
                self._connection.close()

    async def abort(self, reason: str) -> None:
        """Break the stream: the peer gets ``StreamBroken`` with this reason."""
        self._closed = True
        self._connection.end.fail(reason)
        self._connection.service()
        self._connection.wake()
        with CancelScope(shield=True):
            await self._part(PARTING_SECONDS)

    async def watch(self) -> None:
        while True:
            self._raise_if_unusable()
            await self._connection.changed()

    async def _part(self, seconds: float) -> None:
        """Wait until the peer has disconnected, at most ``seconds``."""
        with move_on_after(seconds):
            while not self._connection.end.disconnected:
                await self._connection.changed()

    def _describe(self, problem: str) -> str:
        return f"stream {self.name!r} ({self._role} at {self._connection.endpoint}): {problem}"

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
        self._closing: Event | None = None

    async def send(self, item: T) -> None:
        """Wait for credit and send one item. A cancelled call has sent nothing. Raises ``WireError`` for an item that
        cannot be encoded or is too large (the stream goes on), ``StreamClosed`` and ``StreamBroken``."""
        frames = self._codec.encode(item)
        size = sum(len(frame) for frame in frames)
        await self._gate.take(self._has_credit)
        hello = self._end.peer_hello
        if hello is not None and HEADER_BYTES + size > hello.message_bytes:
            limit = hello.message_bytes - HEADER_BYTES
            raise WireError(self._describe(f"an item of {size} bytes, the receiver takes at most {limit}"))
        self._end.send_item(frames)
        self._connection.service()

    def _has_credit(self) -> bool:
        self._raise_if_unusable()
        return self._end.credit > 0

    async def aclose(self) -> None:
        """End the stream and wait until the receiver has everything, at most ``close_seconds``.

        Raises ``StreamBroken`` where the receiver did not acknowledge the end. A stream that had broken before is
        closed without an error, since ``send`` raises one. A second caller waits for the first, so that leaving
        ``async with`` does not close the connection while a caller waits for the receiver's answer."""
        if self._closed:
            if self._closing is not None:
                await self._closing.wait()
            return
        self._closed = True
        self._closing = Event()
        try:
            await self._end_stream()
        finally:
            self._closing.set()

    async def _end_stream(self) -> None:
        self._connection.wake()
        with move_on_after(self._close_seconds):
            # END is sent after the handshake, when the receiver has granted its first credit.
            while self._end.phase is Phase.WAITING or (self._end.phase is Phase.OPEN and not self._end.has_credit):
                await self._connection.changed()
        self._end.end()
        if self._end.phase is not Phase.ENDING:
            return
        self._connection.service()
        await self._part(self._close_seconds)
        if not self._end.finished:
            self._end.fail(f"the end was not acknowledged within {self._close_seconds} s")
            lost = self._end.sent_items - self._end.taken_items
            raise StreamBroken(self._describe(f"{self._end.reason}; {lost} items may be lost"))


class ZmqReceiveStream(_ZmqStream[T], ReceiveStream[T]):
    """The receiving end; make it with ``zmq_receiver``. ``async for`` over it stops at the end of the stream."""

    def __init__(self, item_type: Any, endpoint: str, *, bind: bool, **options: Unpack[StreamOptions]) -> None:
        super().__init__(item_type, endpoint, StreamRole.RECEIVER, bind, options)
        self._end = ReceivingEnd(self._hello, binds=bind, limits=self._limits, transmit=self._connection.transmit)
        self._connection.end = self._end

    async def receive(self) -> T:
        """Wait for the next item and return it. A cancelled call has taken none. Items that arrived before an end or a
        break come first. Raises ``StreamEnded``, ``StreamClosed`` or ``StreamBroken``."""
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
        """Stop receiving. The sender gets ``StreamBroken`` unless it has already ended the stream."""
        if self._closed:
            return
        if self._end.phase is Phase.ENDED:
            self._closed = True
            self._connection.wake()
            await self._part(PARTING_SECONDS)
        else:
            await self.abort("the receiver closed the stream")


zmq_sender = ZmqSendStream[Any]
"""The sending end of a stream, for ``async with``. ``item_type`` may be a union of msgspec structs.

Raises ``StreamRLError`` for an invalid endpoint. Entering raises it for an endpoint that cannot be bound, or that other
hosts could reach without keys."""

zmq_receiver = ZmqReceiveStream[Any]
"""The receiving end of a stream. Arguments as for ``zmq_sender``."""
