"""Streams inside one event loop: the contract of ``stream`` without bytes or sockets.

Users are tests, runs in one process, and commands that evaluate a model with an environment worker of their own
(``run.environments.local_worker``)."""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, Self, TypeVar

from streamrl.base.errors import StreamBroken, StreamClosed, StreamEnded
from streamrl.base.notifier import Notifier, SerialGate
from streamrl.comm.stream import EndedAtExit, ReceiveStream

T = TypeVar("T")


class _Channel(Generic[T]):
    """State shared by both ends."""

    def __init__(self, window: int) -> None:
        self.items: deque[T] = deque()
        self.window = window
        self.end_sent = False
        self.broken = ""
        self.changed = Notifier()

    def fail(self, reason: str) -> None:
        if not self.end_sent and not self.broken:
            self.broken = reason
            self.changed.notify()


class _MemoryStream(EndedAtExit, Generic[T]):
    def __init__(self, channel: _Channel[T]) -> None:
        self._channel = channel
        self._gate = SerialGate(channel.changed.wait)
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def abort(self, reason: str) -> None:
        """Break the stream: the peer gets ``StreamBroken`` with this reason."""
        self._closed = True
        self._channel.fail(f"broken by the {self._role}: {reason}")
        self._channel.changed.notify()

    async def watch(self) -> None:
        while True:
            self._raise_if_unusable()
            await self._channel.changed.wait()

    def _raise_if_unusable(self) -> None:
        if self._closed:
            raise StreamClosed(f"memory stream: the {self._role} closed it")
        if self._channel.broken:
            raise StreamBroken(f"memory stream: {self._channel.broken}")


class MemorySendStream(_MemoryStream[T]):
    """The sending end; make it with ``memory_stream``."""

    _role = "sender"

    async def send(self, item: T) -> None:
        """Hand over one item; wait while the window is full. A cancelled call has sent nothing."""
        await self._gate.take(self._has_room)
        self._channel.items.append(item)
        self._channel.changed.notify()

    def _has_room(self) -> bool:
        self._raise_if_unusable()
        return len(self._channel.items) < self._channel.window

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._channel.end_sent = not self._channel.broken
            self._channel.changed.notify()


class MemoryReceiveStream(_MemoryStream[T], ReceiveStream[T]):
    """The receiving end; make it with ``memory_stream``."""

    _role = "receiver"

    async def receive(self) -> T:
        """Wait for the next item and return it. A cancelled call has taken none. Items sent before an end or a break
        come first."""
        await self._gate.take(self._has_item)
        item = self._channel.items.popleft()
        self._channel.changed.notify()
        return item

    def _has_item(self) -> bool:
        if self._channel.items and not self._closed:
            return True
        if self._channel.end_sent and not self._closed:
            raise StreamEnded("memory stream: the sender ended it and everything was received")
        self._raise_if_unusable()
        return False

    async def aclose(self) -> None:
        """Stop receiving. The sender gets ``StreamBroken`` unless it has already ended the stream."""
        if not self._closed:
            await self.abort("the receiver closed the stream")


def memory_stream(window: int) -> tuple[MemorySendStream[Any], MemoryReceiveStream[Any]]:
    """Make both ends of a stream. ``window``: items that may be sent and not yet received."""
    if window < 1:
        raise ValueError(f"a window of {window} items lets nothing pass; use at least 1")
    channel: _Channel[Any] = _Channel(window)
    return MemorySendStream(channel), MemoryReceiveStream(channel)
