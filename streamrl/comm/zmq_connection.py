"""The shell around ``stream_protocol``: moves messages between one ZeroMQ socket and one end of a stream.

All socket calls are here, none of them waits, and all happen in the event loop's thread. ``service`` is called after
every own action and whenever libzmq's file descriptor wakes a watch: that descriptor is edge-triggered, so each
call must take everything there is."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import anyio
import zmq

from streamrl.base.errors import StreamRLError
from streamrl.base.notifier import Notifier
from streamrl.comm import zmq_sockets
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.stream_protocol import MessageOrigin, StreamEnd
from streamrl.comm.wire import Buffer, WireLimits

UNBIND_SECONDS = 1.0


class StreamConnection:
    """One socket of one end of a stream. ``end`` is set by its owner before ``open``. Raises ``StreamRLError`` where an
    endpoint is none, or is a tcp address and there is no ``guard``."""

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
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq_sockets.ConnectionMonitor | None = None
        self._ipc_identity: tuple[int, int] | None = None
        self._attached = False
        self._unreachable = False
        self._departure_sent = False
        self._changed = Notifier()
        self._running = anyio.CancelScope(shield=True)

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
                self._ipc_identity = zmq_sockets.ipc_path_identity(self.endpoint)
            else:
                (guard or zmq_sockets).connect(self._socket, self.endpoint)
        except BaseException:
            self.close()
            raise
        self._attached = True
        self.service()

    def close(self) -> None:
        """Free the address and close the socket; bytes still to be sent have ``LINGER_MS``. Idempotent."""
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
        """Move messages until ``stop``. Shielded: an owner that is being cancelled still takes leave of its peer."""
        with self._running:
            async with anyio.create_task_group() as tasks:
                if self._monitor is not None:
                    tasks.start_soon(self._watch, self._monitor.fd)
                if self._socket is not None:
                    tasks.start_soon(self._watch, self._socket.fileno())
                if self._guard is not None and self._gate_fd >= 0:
                    tasks.start_soon(self._watch_gate, self._guard, self._gate_fd)

    def stop(self) -> None:
        """End ``run``."""
        self._running.cancel()

    async def _watch(self, fd: int) -> None:
        while True:
            await anyio.wait_readable(fd)
            self.service()

    async def _watch_gate(self, guard: KeyGuard, fd: int) -> None:
        """Raise ``StreamRLError`` when no peer can be authenticated any more."""
        await anyio.wait_readable(fd)
        guard.check()

    async def changed(self) -> None:
        """Wait until something has happened to the stream."""
        await self._changed.wait()

    def wake(self) -> None:
        """Let every waiter look again."""
        self._changed.notify()

    # ---- messages --------------------------------------------------------------------------------

    def transmit(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Hand one message to libzmq. A peer that is gone is noticed by ``service``."""
        if self._socket is None:
            return
        message = [peer, *frames] if self._binds else frames
        try:
            self._socket.send_multipart(message, flags=zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            if self.end.peer is not None and peer == self.end.peer.peer:
                self._unreachable = True

    def service(self) -> None:
        """Take in everything that has arrived and let the protocol answer."""
        if self._socket is None:
            return
        self._read_monitor()
        departed = self._connection_is_lost()
        received = self._receive_all(accept_unknown_peers=not departed)
        # Only now: what the peer said before it went (its last items, or why it broke the stream) comes first.
        if self._connection_is_lost() and not self._departure_sent:
            self._departure_sent = True
            self.end.on_disconnected()
            received = True
        # Detaching ends the connection too: a listener owns its sessions. So not before the peer has heard everything.
        if self.end.finished and self._attached and (self.end.disconnected if self._binds else self._departure_sent):
            self._detach()
            self.service()  # giving an address back consumes wake-ups of libzmq, so look once more
        if received:
            self.wake()

    def _receive_all(self, *, accept_unknown_peers: bool) -> bool:
        received = False
        assert self._socket is not None
        while zmq_sockets.has_message(self._socket):
            message = self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            received = True
            peer = bytes(message.pop(0).buffer) if self._binds else b""
            known = self.end.peer is not None and self.end.peer.peer == peer
            if known:
                self.end.on_message(MessageOrigin(peer, None), [frame.buffer for frame in message])
            elif accept_unknown_peers:
                try:
                    connection = self._connection_of(message)
                except zmq.ZMQError:  # a peer of ZMTP 1.0 or 2.0, or random bytes that parse as such: no metadata
                    self.end.unknown_peers += 1
                    continue
                self.end.on_message(MessageOrigin(peer, connection), [frame.buffer for frame in message])
        return received

    def _connection_of(self, message: Sequence[zmq.Frame]) -> int | None:
        """Number of the connection a message came by: its file descriptor, as of now."""
        monitor = self._read_monitor()  # so that an earlier connection on the same descriptor is not taken for this one
        return monitor.connection_on(int(message[0].get(zmq.SRCFD))) if message else None

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
        """Give the address back: a binding end stops listening, so that its successor can bind at once; a connecting
        end stops reconnecting."""
        if not self._attached or self._socket is None:
            return
        self._attached = False
        try:
            if self._binds:
                self._socket.unbind(self.endpoint)
            else:
                self._socket.disconnect(self.endpoint)
        except zmq.ZMQError as error:
            if error.errno != errno.ENOENT:  # already gone with the connection
                raise
        if self._binds and self._monitor is not None:
            self._monitor.wait_until_unbound(UNBIND_SECONDS)
            zmq_sockets.remove_ipc_path(self.endpoint, self._ipc_identity)
