"""A network for the real streams: it takes the place of ``streamrl.comm.zmq_connection.StreamConnection``.

Everything above it is the product's: ``zmq_sender``, ``zmq_receiver``, the protocol of both ends, the wire format. It
behaves as ZeroMQ over a connection does: one binder an endpoint, who connects tries again and again, a binder that
closes ends its connections, messages of one connection arrive in order, a dead process is noticed by its connections.
Faults may break that: see ``Wire``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import anyio

from campaigns.faults.virtual_time import PROCESS, SimulatedProcess, VirtualLoop
from streamrl.base.errors import StreamRLError
from streamrl.base.notifier import Notifier
from streamrl.comm.stream_protocol import MessageOrigin, ReceivingEnd, StreamEnd

RECONNECT_S = 0.1
SLOW_S = 0.2
ONE_TURN_S = 1e-6


class Wire:
    """One direction of one connection. ``twist``: what is done to the next message that a fault chooses."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.blocked_until = 0.0
        self.twist: Callable[[list[bytes]], list[list[bytes]]] | None = None


class Link:
    """A connection. ``number``: its name at both ends."""

    def __init__(self, number: int, binder: SimulatedConnection, connector: SimulatedConnection) -> None:
        self.number = number
        self.identity = number.to_bytes(4, "big")
        self.binder = binder
        self.connector = connector
        self.open = True
        self.wires = {binder: Wire(), connector: Wire()}  # by sender

    def other(self, end: SimulatedConnection) -> SimulatedConnection:
        return self.connector if end is self.binder else self.binder


class Network:
    """All connections of a world. ``random`` decides how long messages take; while ``slow``, 50 times as long."""

    def __init__(self, loop: VirtualLoop, random: Random, latency_s: float = 0.002) -> None:
        self.loop = loop
        self.random = random
        self.latency_s = latency_s
        self.slow = 0
        self.binders: dict[str, SimulatedConnection] = {}
        self.waiting: dict[str, list[SimulatedConnection]] = {}
        self.links: list[Link] = []
        self.accepted: Callable[[str, SimulatedProcess, int, int], None] = lambda *_: None
        self._numbers = 0

    def make_connection(self, endpoint: str, *, bind: bool, window: int, limits: Any, **_: Any) -> SimulatedConnection:
        """The stand-in for ``StreamConnection(...)``."""
        return SimulatedConnection(self, endpoint, bind)

    def delay(self) -> float:
        """Of one message."""
        mean = min(50 * self.latency_s, SLOW_S) if self.slow else self.latency_s
        return self.random.expovariate(1 / mean) + mean / 10

    def bind(self, connection: SimulatedConnection) -> None:
        if connection.endpoint in self.binders:
            raise StreamRLError(f"cannot bind {connection.endpoint}: Address already in use")
        self.binders[connection.endpoint] = connection
        for waiting in self.waiting.pop(connection.endpoint, []):
            self.later(self.delay(), waiting, self.connect, waiting)

    def connect(self, connection: SimulatedConnection) -> None:
        """A handshake, or a place among those that try again."""
        if connection.closed or connection.link is not None:
            return
        binder = self.binders.get(connection.endpoint)
        if binder is None:
            self.waiting.setdefault(connection.endpoint, []).append(connection)
            return
        self._numbers += 1
        link = Link(self._numbers, binder, connection)
        self.links.append(link)
        connection.link = link
        binder.links[link.identity] = link
        connection.connected()

    def send(self, sender: SimulatedConnection, link: Link, frames: Sequence[Any]) -> None:
        wire = link.wires[sender]
        message = [bytes(frame) for frame in frames]
        messages = [message]
        if wire.twist is not None:
            messages = wire.twist(message)
        for one in messages:
            at = max(self.loop.now + self.delay(), wire.free_at, wire.blocked_until)
            wire.free_at = at + ONE_TURN_S
            receiver = link.other(sender)
            self.loop.call_at(at, receiver.arrived, link, one, context=receiver.context)

    def disconnect(self, link: Link, *, quietly: SimulatedConnection | None = None) -> None:
        """The connection is gone; each end but ``quietly`` sees it after what was on its way."""
        if not link.open:
            return
        link.open = False
        self.links.remove(link)
        for end in (link.binder, link.connector):
            if end is not quietly:
                wire = link.wires[link.other(end)]
                at = max(self.loop.now + self.delay(), wire.free_at)
                self.loop.call_at(at, end.lost, link, context=end.context)

    def later(self, seconds: float, whose: SimulatedConnection, function: Callable[..., None], *arguments: Any) -> None:
        self.loop.call_later(seconds, function, *arguments, context=whose.context)

    def process_died(self, process: SimulatedProcess) -> None:
        """The kernel closes its sockets: addresses are free, peers see the end of their connections."""
        for connection in process.connections:
            connection.torn_down()
        process.connections.clear()


class SimulatedConnection:
    """One socket of one end of a stream: what ``StreamConnection`` is to the product."""

    end: StreamEnd

    def __init__(self, network: Network, endpoint: str, bind: bool) -> None:
        process = PROCESS.get()
        assert process is not None, "a stream outside of every process"
        self.network = network
        self.endpoint = endpoint
        self.process = process
        self.context = process.context
        self.closed = False
        self.link: Link | None = None
        self.links: dict[bytes, Link] = {}
        self._binds = bind
        self._departure_sent = False
        self._attached = False
        self._changed = Notifier()
        self._failure: Exception | None = None
        self._running = anyio.CancelScope(shield=True)

    # ---- what the streams call -------------------------------------------------------------------

    def open(self) -> None:
        if self._binds:
            self.network.bind(self)
        else:
            self.network.later(self.network.delay(), self, self.network.connect, self)
        self._attached = True
        self.process.connections.append(self)

    def close(self) -> None:
        if not self.closed:
            self.torn_down()
            if self in self.process.connections:
                self.process.connections.remove(self)
            self.wake()

    async def run(self) -> None:
        with self._running:
            await anyio.sleep_forever()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._running.cancel()

    async def changed(self) -> None:
        await self._changed.wait()

    def wake(self) -> None:
        self._changed.notify()

    def transmit(self, peer: bytes, frames: Sequence[Any]) -> None:
        link = self.links.get(peer) if self._binds else self.link
        if link is not None and link.open and not self.closed:
            self.network.send(self, link, frames)

    def service(self) -> None:
        if self.end.finished and self._attached and (self.end.disconnected if self._binds else self._departure_sent):
            self._detach()

    # ---- what happens ----------------------------------------------------------------------------

    def connected(self) -> None:
        """Who connects speaks first."""
        self.end.on_connected()
        self.service()
        self.wake()

    def arrived(self, link: Link, frames: list[bytes]) -> None:
        """A message. One of a connection that this end has left is nobody's."""
        if self.closed or (self.link is not link and link.identity not in self.links):
            return
        accepted = self.end.received_items if isinstance(self.end, ReceivingEnd) else 0
        try:
            self.end.on_message(MessageOrigin(link.identity if self._binds else b"", link.number), frames)
        except Exception as error:  # noqa: BLE001 - raised in the task that runs the connection, as where a socket is read
            self._failure = error
            self.stop()
            return
        if isinstance(self.end, ReceivingEnd) and self.end.received_items > accepted:
            self.network.accepted(self.endpoint, link.other(self).process, len(self.end.items), self.end.window)
        self.service()
        self.wake()

    def lost(self, link: Link) -> None:
        """The connection is gone."""
        if self.closed:
            return
        if self._binds:
            self.links.pop(link.identity, None)
            is_peer = self.end.peer is not None and self.end.peer.routing_id == link.identity
        else:
            self.link = None
            is_peer = self.end.peer is not None
        if is_peer and not self._departure_sent:
            self._departure_sent = True
            self.end.on_disconnected()
        elif not self._binds and self._attached:
            self.network.later(RECONNECT_S, self, self.network.connect, self)
        self.service()
        self.wake()

    def torn_down(self) -> None:
        """The socket is closed, by its owner or because its process died."""
        self._detach()
        self.closed = True

    def _detach(self) -> None:
        if not self._attached:
            return
        self._attached = False
        if self._binds and self.network.binders.get(self.endpoint) is self:
            del self.network.binders[self.endpoint]
        for link in [*self.links.values(), *([self.link] if self.link is not None else [])]:
            self.network.disconnect(link, quietly=self)
        waiting = self.network.waiting.get(self.endpoint, [])
        if self in waiting:
            waiting.remove(self)
