"""Binding, connecting and monitoring of ZeroMQ sockets, and the sockets of streams.

``zmq_connection`` and ``guarded_sockets`` call it in every process; over tcp ``guarded_sockets`` decides which peers
may connect. Weight servers and commands use single functions about addresses."""

from __future__ import annotations

import errno
import os
import socket as sockets
import stat
from collections.abc import Iterator
from logging import getLogger
from time import monotonic
from typing import Any

import zmq
from zmq import NOBLOCK, POLLIN, Context, ZMQError
from zmq.utils.monitor import parse_monitor_message

from streamrl.base.errors import InputError, StreamRLError
from streamrl.base.host_addresses import wrong_port
from streamrl.comm.socket_options import ByteSocket, make_socket

log = getLogger(__name__)

IPC_PATH_BYTES = 107
"""Longest path of a unix socket: an address has 108 bytes with the closing zero."""

LINGER_MS = 500
"""Time that unsent bytes have after the socket of a stream was closed. After a close handshake there are none."""

KEEP_S = 5
"""Seconds between two checks of the file of a socket."""

_TRANSPORTS = ("ipc", "tcp")
_MONITORED = (
    zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
)


def transport_of(endpoint: str) -> str:
    """Transport of ``endpoint``: ``ipc`` or ``tcp``. Raises ``StreamRLError``, with the remedy, for an invalid one."""
    transport, separator, address = endpoint.partition("://")
    if not separator or transport not in _TRANSPORTS or not address:
        raise InputError(f"endpoint {endpoint!r} is not one of ipc://PATH, tcp://HOST:PORT")
    if transport == "ipc" and len(address.encode()) > IPC_PATH_BYTES:
        raise InputError(
            f"endpoint {endpoint!r}: the path has {len(address.encode())} bytes and a unix socket path may have "
            f"{IPC_PATH_BYTES}; use a shorter run or socket directory"
        )
    if transport == "tcp":
        host, colon, port = address.rpartition(":")
        if not colon or not host:
            raise InputError(f"endpoint {endpoint!r} has no port; write tcp://HOST:PORT")
        if port != "*" and (problem := wrong_port(port)):
            raise InputError(f"endpoint {endpoint!r}: {problem}")
        if ":" in host and not host.startswith("["):
            raise InputError(f"endpoint {endpoint!r}: put an IPv6 address in brackets, as in tcp://[::1]:5555")
    return transport


class StreamContext(Context["zmq.Socket[bytes]"]):
    """The context of streams that stay on this host."""

    _instance = None  # not shared with zmq.Context.instance(), which vllm uses in the same process


def create_socket(
    context: Context[Any], kind: int, endpoint: str, *, max_frame_bytes: int, receive_high_water_mark: int
) -> ByteSocket:
    """Make the socket of a stream. A frame above ``max_frame_bytes`` ends the connection. Sending has no high-water
    mark, since a sender queues nothing without credit; the mark for receiving limits a peer that ignores credit."""
    transport_of(endpoint)
    return make_socket(
        context,
        kind,
        endpoint=endpoint,
        max_frame_bytes=max_frame_bytes,
        linger_ms=LINGER_MS,
        send_high_water_mark=0,
        receive_high_water_mark=receive_high_water_mark,
    )


def bind(socket: ByteSocket, endpoint: str) -> str:
    """Bind and return the endpoint with its real port. ``KeyGuard`` decides which peers may connect. Raises
    ``StreamRLError`` naming the endpoint and the remedy."""
    if transport_of(endpoint) == "ipc" and has_ipc_listener(endpoint):
        raise StreamRLError(f"cannot bind {endpoint}: {_bind_remedy(errno.EADDRINUSE)}")
    try:
        socket.bind(endpoint)
    except ZMQError as error:
        raise StreamRLError(
            f"cannot bind {endpoint}: {zmq.strerror(error.errno or 0)}; {_bind_remedy(error.errno)}"
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") or endpoint


def connect(socket: ByteSocket, endpoint: str) -> None:
    """Start connecting; libzmq retries until somebody binds. Raises ``StreamRLError`` for an impossible address."""
    try:
        socket.connect(endpoint)
    except ZMQError as error:
        raise StreamRLError(
            f"cannot connect to {endpoint}: {zmq.strerror(error.errno or 0)}; check host and port"
        ) from error


def has_message(socket: ByteSocket) -> bool:
    """Return whether a receive would not wait."""
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & POLLIN)


def _bind_remedy(number: int | None) -> str:
    match number:
        case errno.EADDRINUSE:
            return "another process or stream holds it: stop that one (`ss -ltnp` names it) or choose another endpoint"
        case errno.EADDRNOTAVAIL | errno.ENODEV:
            return "this host has no such address: bind an address of this host, or 0.0.0.0"
        case errno.EACCES | errno.EPERM:
            return "not permitted: choose a port above 1023, or a directory that you may write"
        case errno.ENOENT | errno.ENOTDIR:
            return "its directory does not exist: create it first"
        case _:
            return "check the address"


def has_ipc_listener(endpoint: str) -> bool:
    """Return whether a process listens at an ipc ``endpoint``; False for no file, or for the socket of a process that
    has ended. Raises ``StreamRLError`` where the path is anything but a socket: libzmq would unlink it before binding,
    as it unlinks the socket of another process."""
    address = endpoint.removeprefix("ipc://")
    if address.startswith("@"):
        address = "\0" + address[1:]
    elif os.path.lexists(address) and not stat.S_ISSOCK(os.lstat(address).st_mode):
        raise StreamRLError(f"{endpoint} is a file or directory, not a socket: choose a path where nothing is")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except BlockingIOError:
            pass  # the listener's backlog is full
        except OSError:
            return False
    return True


class IpcPath:
    """The file of the socket that is bound at an ipc ``endpoint``; another endpoint has none. Where the file is there,
    other processes can connect; cleaners of folders for temporary files take what is old."""

    def __init__(self, socket: ByteSocket, endpoint: str) -> None:
        self._socket = socket
        self._endpoint = endpoint
        self._identity = _ipc_path_identity(endpoint)
        self._looked_s = monotonic()

    def keep(self) -> None:
        """Renew the times of the file, and bind the socket again where the file is gone. Its connections go on. Call it
        every ``KEEP_S`` seconds or more often; it looks no more often."""
        if self._identity is None or monotonic() < self._looked_s + KEEP_S:
            return
        self._looked_s = monotonic()
        path = self._endpoint.removeprefix("ipc://")
        try:
            os.utime(path)
            return
        except OSError:
            log.warning("the socket %s was taken away, as by a cleaner of temporary files; it is bound again", path)
        try:
            bind(self._socket, self._endpoint)
            self._identity = _ipc_path_identity(self._endpoint)
        except StreamRLError as error:
            log.warning("%s", error)

    def remove(self) -> None:
        """Remove the file, which libzmq leaves of a closed listener, unless another process has bound there since."""
        if self._identity is not None and _ipc_path_identity(self._endpoint) == self._identity:
            os.unlink(self._endpoint.removeprefix("ipc://"))


def _ipc_path_identity(endpoint: str) -> tuple[int, int] | None:
    """Device and inode of a bound ipc path."""
    if not endpoint.startswith("ipc://") or endpoint.startswith("ipc://@"):
        return None
    try:
        status = os.stat(endpoint.removeprefix("ipc://"))
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


class ConnectionMonitor:
    """Reader of the connection events of one socket.

    libzmq names a connection by its file descriptor, which the kernel reuses; so the monitor numbers connections as
    they open. ``listening`` turns False when the bound address is free again."""

    def __init__(self, socket: ByteSocket) -> None:
        self._socket = socket
        self._events: ByteSocket = socket.get_monitor_socket(_MONITORED)
        self._open: dict[int, int] = {}
        self._last_number = 0
        self._handshakes = 0
        self.listening = True

    @property
    def fd(self) -> int:
        """File descriptor that becomes readable when there may be events; then call ``read``."""
        return self._events.fileno()

    def read(self) -> None:
        """Read all events so far."""
        for event, value in self._pending():
            match event:
                case zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED:
                    self._last_number += 1
                    self._open[value] = self._last_number
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._handshakes += 1
                case zmq.EVENT_DISCONNECTED:
                    self._open.pop(value, None)
                case zmq.EVENT_CLOSED:
                    self.listening = False
                case _:
                    continue

    def take_handshakes(self) -> int:
        """Return the number of connections that became usable since the last call."""
        count = self._handshakes
        self._handshakes = 0
        return count

    def connection_on(self, fd: int | None) -> int | None:
        """Number of the open connection on this file descriptor; None where there is none."""
        return None if fd is None else self._open.get(fd)

    def is_open(self, connection: int) -> bool:
        """Return whether this connection is still open."""
        return connection in self._open.values()

    def wait_until_unbound(self, seconds: float) -> bool:
        """Block until the listener is closed, which takes about a millisecond, so that the address can be bound again.
        Returns whether it is closed."""
        deadline = monotonic() + seconds
        while self.listening and (remaining_s := deadline - monotonic()) > 0:
            self._events.poll(int(remaining_s * 1000) + 1)
            self.read()
        return not self.listening

    def close(self) -> None:
        """Stop monitoring. Call it before the socket is closed."""
        self._socket.disable_monitor()
        self._events.close(linger=0)

    def _pending(self) -> Iterator[tuple[int, int]]:
        while has_message(self._events):
            event = parse_monitor_message(self._events.recv_multipart(NOBLOCK))
            yield int(event["event"]), int(event["value"])
