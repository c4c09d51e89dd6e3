"""Moves messages between one ZeroMQ socket and one end of a stream, a state machine of ``stream_protocol``.

``zmq_stream`` makes one connection for each stream, in any process. All its socket calls are here; none of them waits,
and all happen in the thread of the event loop. ``service`` runs after every action of the stream and whenever libzmq's
file descriptor becomes readable. This descriptor is edge-triggered, so each call must receive all waiting messages."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import anyio
import zmq
from anyio import CancelScope, create_task_group, sleep
from zmq import NOBLOCK, ZMQError

from streamrl.base.errors import StreamRLError
from streamrl.base.notifier import Notifier
from streamrl.comm import socket_options, zmq_sockets
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.socket_options import ByteSocket
from streamrl.comm.stream_protocol import MessageOrigin, StreamEnd
from streamrl.comm.wire import Buffer, WireLimits

UNBIND_SECONDS = 1.0


class StreamConnection:
    """One socket of one end of a stream. Its owner sets ``end`` before ``open``. Raises ``StreamRLError`` for an
    invalid endpoint, or for a tcp address without a ``guard``."""

    end: StreamEnd

    def __init__(self, endpoint: str, *, bind: bool, window: int, limits: WireLimits, guard: KeyGuard | None) -> None:
        self.endpoint = endpoint
        self._binds = bind
        self._gate_fd = -1
        self._limits = limits
        self._transport = zmq_sockets.transport_of(endpoint)
        if self._transport == "tcp" and guard is None:
            raise StreamRLError(f"{endpoint}: nothing decides who may connect over tcp; give the stream a guard")
        self._guard = guard if self._transport == "tcp" else None
        self._receive_high_water_mark = 2 * window + 64  # items and a credit for each, with room for the handshake
        self._socket: ByteSocket | None = None
        self._monitor: zmq_sockets.ConnectionMonitor | None = None
        self._path: zmq_sockets.IpcPath | None = None
        self._attached = False
        self._unreachable = False
        self._departure_sent = False
        self._changed = Notifier()
        self._running = CancelScope(shield=True)

    # ---- life ------------------------------------------------------------------------------------

    def open(self) -> None:
        """Bind, or start to connect. Raises ``StreamRLError``."""
        guard = self._guard
        self._socket = zmq_sockets.create_socket(
            guard.context if guard else zmq_sockets.StreamContext.instance(),
            zmq.ROUTER if self._binds else zmq.DEALER,
            self.endpoint,
            max_frame_bytes=self._limits.frame_bytes,
            receive_high_water_mark=self._receive_high_water_mark,
        )
        try:
            self._monitor = zmq_sockets.ConnectionMonitor(self._socket)
            if self._binds:
                self.endpoint = (guard or zmq_sockets).bind(self._socket, self.endpoint)
                self._gate_fd = guard.watch(self._socket) if guard else -1
                self._path = zmq_sockets.IpcPath(self._socket, self.endpoint)
            else:
                (guard or zmq_sockets).connect(self._socket, self.endpoint)
        except BaseException:
            self.close()
            raise
        self._attached = True
        self.service()

    def close(self) -> None:
        """Free the address and close the socket. Unsent bytes have ``LINGER_MS`` to leave. Idempotent."""
        if self._socket is None:
            return
        self._detach()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        self._socket.close()
        self._socket = None
        if self._gate_fd >= 0:
            os.close(self._gate_fd)
            self._gate_fd = -1
        self.wake()

    async def run(self) -> None:
        """Move messages until ``stop``. Shielded, so that an owner that is cancelled can still tell its peer."""
        with self._running:
            async with create_task_group() as tasks:
                if self._monitor is not None:
                    tasks.start_soon(self._watch, self._monitor.fd)
                if self._socket is not None:
                    tasks.start_soon(self._watch, self._socket.fileno())
                if self._guard is not None and self._gate_fd >= 0:
                    tasks.start_soon(self._watch_gate, self._guard, self._gate_fd)
                if self._path is not None:
                    tasks.start_soon(self._keep, self._path)

    def stop(self) -> None:
        """End ``run``."""
        self._running.cancel()

    async def _watch(self, fd: int) -> None:
        while True:
            await anyio.wait_readable(fd)
            self.service()

    async def _watch_gate(self, guard: KeyGuard, fd: int) -> None:
        """Raise ``StreamRLError`` when the gate has ended, so that no peer can be authenticated any more."""
        await anyio.wait_readable(fd)
        guard.check()

    async def _keep(self, path: zmq_sockets.IpcPath) -> None:
        while True:
            await sleep(zmq_sockets.KEEP_S)
            if self._attached and self._socket is not None:
                path.keep()

    async def changed(self) -> None:
        """Wait until the stream has changed."""
        await self._changed.wait()

    def wake(self) -> None:
        """Wake every waiter of ``changed``."""
        self._changed.notify()

    # ---- messages --------------------------------------------------------------------------------

    def transmit(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Hand one message to libzmq. ``service`` reports a peer that is gone."""
        if self._socket is None:
            return
        message = [peer, *frames] if self._binds else frames
        try:
            self._socket.send_multipart(message, flags=NOBLOCK, copy=False)
        except ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            if self.end.peer is not None and peer == self.end.peer.routing_id:
                self._unreachable = True

    def service(self) -> None:
        """Receive all waiting messages and let the protocol answer them."""
        if self._socket is None:
            return
        self._read_monitor()
        departed = self._connection_is_lost()
        received = self._receive_all(accept_unknown_peers=not departed)
        # Not before the messages: the last items of a peer, or its reason for breaking the stream, come first.
        if self._connection_is_lost() and not self._departure_sent:
            self._departure_sent = True
            if socket_options.stays_here(self.endpoint):
                self.end.on_disconnected()
            else:
                self.end.on_disconnected(
                    f"its connection closed, or no heartbeat came for {socket_options.HEARTBEAT_TIMEOUT_MS / 1000:g} s "
                    "(again after each large message: large packets are lost on the way, look at the MTU)"
                )
            received = True
        # Detaching a listener also ends its connections, so the peer must have received everything first.
        peer_is_done = self.end.disconnected if self._binds else self._departure_sent
        if self.end.finished and self._attached and peer_is_done:
            self._detach()
            self.service()  # detaching consumes wake-ups of libzmq, so there may be more messages
        if received:
            self.wake()

    def _receive_all(self, *, accept_unknown_peers: bool) -> bool:
        received = False
        assert self._socket is not None
        while zmq_sockets.has_message(self._socket):
            message = self._socket.recv_multipart(flags=NOBLOCK, copy=False)
            received = True
            routing_id = b""
            if self._binds:
                routing_id = bytes(message.pop(0).buffer)
            is_peer = self.end.peer is not None and self.end.peer.routing_id == routing_id
            if is_peer:
                self.end.on_message(MessageOrigin(routing_id, None), [frame.buffer for frame in message])
            elif accept_unknown_peers:
                try:
                    connection = self._connection_of(message)
                except ZMQError:  # a peer of ZMTP 1.0 or 2.0, or random bytes that parse as such: no metadata
                    self.end.unknown_peers += 1
                    continue
                self.end.on_message(MessageOrigin(routing_id, connection), [frame.buffer for frame in message])
        return received

    def _connection_of(self, message: Sequence[zmq.Frame]) -> int | None:
        """Number of the open connection by which ``message`` came; None where it has closed."""
        monitor = self._read_monitor()  # up to date: the kernel may have reused the descriptor of a closed connection
        if not message:
            return None
        return monitor.connection_on(int(message[0].get(zmq.SRCFD)))

    def _read_monitor(self) -> zmq_sockets.ConnectionMonitor:
        assert self._monitor is not None, "open() was not called"
        self._monitor.read()
        for _ in range(self._monitor.take_handshakes()):
            self.end.on_connected()
        return self._monitor

    def _connection_is_lost(self) -> bool:
        peer = self.end.peer
        monitor = self._monitor
        if peer is None or monitor is None:
            return False
        return self._unreachable or peer.connection is None or not monitor.is_open(peer.connection)

    # ---- address ---------------------------------------------------------------------------------

    def _detach(self) -> None:
        """Give up the address. A binding end stops listening, so that its successor can bind at once; a connecting end
        stops reconnecting."""
        if not self._attached or self._socket is None:
            return
        self._attached = False
        try:
            if self._binds:
                self._socket.unbind(self.endpoint)
            else:
                self._socket.disconnect(self.endpoint)
        except ZMQError as error:
            if error.errno != errno.ENOENT:  # already gone with the connection
                raise
        if self._path is not None and self._monitor is not None:
            self._monitor.wait_until_unbound(UNBIND_SECONDS)
            self._path.remove()
