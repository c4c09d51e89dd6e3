"""Connections of an HTTP server that end where the peer sends nothing, and make room for those that do.

uvicorn gives a connection no time for its first request, and refuses requests once too many connections are open,
idle ones included. With ``Connections.open`` as ``http`` of its configuration, a peer that only connects costs nobody
an answer: its connection is closed after ``HEAD_S``, or earlier for a new one. The endpoint for agents and the page of
runs are served in this way. Importing this file imports uvicorn."""

from __future__ import annotations

import asyncio
import resource
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # without httptools it is the protocol of h11, which bounds heads itself
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as AutoHTTPProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S = 10.0
"""Seconds for the head of a request to arrive: on a new connection, or after a request without the right key."""
KEPT_S = 75.0
"""Seconds for the head of the next request after one that had a key."""
LARGEST_HEAD = 16 << 10
"""Largest number of bytes of the head of a request, for which httptools has no limit."""
MOST_CONNECTIONS = 4096
"""Largest number of connections of one server."""


_FINDS_PARTS = AutoHTTPProtocol.__module__.endswith("httptools_impl")


class Connections:
    """The connections of one server: at most half as many as the process may open files, and
    ``MOST_CONNECTIONS``."""

    def __init__(self) -> None:
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limit = MOST_CONNECTIONS
        if open_files != resource.RLIM_INFINITY:
            self._limit = min(MOST_CONNECTIONS, open_files // 2)
        self._idle: dict[str, dict[Connection, None]] = {}  # by address of the peer; the longest idle first

    def open(self, *arguments: Any, **options: Any) -> Connection:
        """Return the protocol of a new connection; uvicorn calls it with the arguments of its own protocols."""
        return Connection(self, *arguments, **options)

    def make_room(self, number: int) -> bool:
        """Close an idle connection where ``number`` are open and more would be too many: the one that is idle longest
        of the address that has most idle ones. Returns whether another connection may be opened."""
        if number < self._limit:
            return True
        idle = max(self._idle.values(), key=len, default={})
        for connection in idle:
            connection.abort()
            return True
        return False

    def add_idle(self, connection: Connection) -> None:
        """Note that ``connection`` has no request that is being answered."""
        self._idle.setdefault(connection.peer, {})[connection] = None

    def remove_idle(self, connection: Connection) -> None:
        """Note that ``connection`` is closed, or has a request that is being answered."""
        of_peer = self._idle.get(connection.peer, {})
        of_peer.pop(connection, None)
        if not of_peer:
            self._idle.pop(connection.peer, None)


class Connection(AutoHTTPProtocol):
    """One connection. The application returns whether the request had a key; None counts as a key, so that a server
    without keys keeps connections open."""

    def __init__(self, connections: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.peer = ""
        self._all = connections
        self._answers = 0
        self._head_size = 0
        self._unread = 0  # bytes since the parser has last found something in them
        self._timer: asyncio.TimerHandle | None = None
        self._application: Any = self.app
        self.app = self._answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        has_room = self._all.make_room(len(self.connections))
        super().connection_made(transport)
        self.peer = str(transport.get_extra_info("peername", ("",))[0])
        if has_room:
            self._become_idle(HEAD_S)
        else:
            self.abort()

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self._unread > LARGEST_HEAD and _FINDS_PARTS and not self.transport.is_closing():
            self.send_400_response(f"a part of the head has more than {LARGEST_HEAD} bytes")

    # httptools calls these; an error in one of them is an invalid request to uvicorn.

    def on_message_begin(self) -> None:
        self._head_size = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_in_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_in_head(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def _count_in_head(self, size: int) -> None:
        self._unread = 0
        self._head_size += size
        if self._head_size > LARGEST_HEAD:
            raise ValueError(f"the head has more than {LARGEST_HEAD} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        self._become_busy()
        self._unset_keepalive_if_required()  # after a reset, uvicorn's timer would keep this object for 75 s
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection without an answer."""
        self._become_busy()
        self.connections.discard(self)  # uvicorn does so only when the loop comes to it
        self.transport.abort()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self._become_busy()
        self._answers += 1
        has_key = False
        try:
            has_key = await self._application(scope, receive, send) is not False
        finally:
            self._answers -= 1
            if not self._answers and not self.transport.is_closing():
                self._become_idle(KEPT_S if has_key else HEAD_S)

    def _become_idle(self, seconds: float) -> None:
        self._all.add_idle(self)
        self._timer = self.loop.call_later(seconds, self.abort)

    def _become_busy(self) -> None:
        self._all.remove_idle(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
