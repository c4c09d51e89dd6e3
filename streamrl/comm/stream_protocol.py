"""Messages between the two ends of a ZeroMQ stream, as state machines without sockets, clocks or tasks.

``zmq_connection`` moves their messages between an end and its socket, in every process with a ``zmq_stream``; the fault
campaigns move them in virtual time.

::

    connecting end            binding end
      HELLO      ->                            item type, role, window and session of the connecting end
                 <-  WELCOME | REFUSED         item type, role and window of the binding end, for that session
      READY      ->                            both ends are open
    sender                    receiver
                 <-  CREDIT n                  the application has taken n items; first with n = 0
      ITEM n     ->                            never more than the window ahead of the last credit
      END n      ->                            the stream ends after n items
                 <-  GOODBYE                   END (or BROKEN) has arrived
      BYE        ->                            GOODBYE has arrived, the sockets may close
      BROKEN     <->                           either end, at any time, with the reason; answered by GOODBYE

The number of ITEM, CREDIT and END is the sequence number of the header. HELLO, WELCOME and READY carry a ``Hello``.
REFUSED and BROKEN carry a reason in UTF-8, so that an end of another version understands both."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum, StrEnum

from msgspec import Struct, msgpack
from msgspec.structs import replace

from streamrl.base.errors import UNDECODABLE, WireError
from streamrl.comm.wire import WIRE_VERSION, Buffer, Header, WireLimits, check_sizes, pack_header, parse_header

REASON_BYTES = 4096


class Kind(IntEnum):
    """Message kinds. Numbers are never reused."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    READY = 4
    ITEM = 5
    CREDIT = 6
    END = 7
    GOODBYE = 8
    BYE = 9
    BROKEN = 10


class StreamRole(StrEnum):
    SENDER = "sender"
    RECEIVER = "receiver"


class Phase(StrEnum):
    """Phase of one end: ``WAITING`` for a peer, ``OPEN``, ``ENDING`` (a sender has sent END), ``ENDED``, ``BROKEN``."""

    WAITING = "waiting"
    OPEN = "open"
    ENDING = "ending"
    ENDED = "ended"
    BROKEN = "broken"


class Hello(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Handshake of one end.

    ``item_type``: class names of the items;
    ``window``: items that may be under way;
    ``message_bytes``: size of the largest message that the end accepts;
    ``session``: random name of the connecting end, repeated by the binding end;
    ``name``: name of the stream for messages;
    ``epoch``: number of the start of the run that the end belongs to (0: any);
    ``byte_order``: order of the bytes of array elements."""

    item_type: str
    role: StreamRole
    window: int
    message_bytes: int
    session: str
    name: str = ""
    epoch: int = 0
    byte_order: str = sys.byteorder


class MessageOrigin(Struct, frozen=True):
    """Origin of a message. ``routing_id``: id of the sender on a ROUTER, empty on a DEALER; ``connection``: number of
    the connection, None once it is closed."""

    routing_id: bytes
    connection: int | None


_NO_ROUTING_ID = b""

Transmit = Callable[[bytes, Sequence[Buffer]], None]

_encode_hello = msgpack.Encoder().encode
_decode_hello = msgpack.Decoder(Hello).decode


class StreamEnd(ABC):
    """Common part of both ends: handshake, breaking, parting.

    ``transmit(peer, frames)`` hands a message to the socket and never waits. Any call may change ``phase``, ``reason``
    (why the stream is broken) and ``disconnected`` (the peer neither sends nor needs anything more)."""

    def __init__(self, hello: Hello, *, binds: bool, limits: WireLimits, transmit: Transmit) -> None:
        self.hello = hello
        self.binds = binds
        self.limits = limits
        self.phase = Phase.WAITING
        self.reason = ""
        self.peer: MessageOrigin | None = None
        self.peer_hello: Hello | None = None
        self.disconnected = True
        self.unknown_peers = 0
        """Messages ignored because another process than the peer sent them."""
        self._transmit = transmit

    @property
    def finished(self) -> bool:
        """Return whether the stream can pass no more items."""
        return self.phase in (Phase.ENDED, Phase.BROKEN)

    @property
    def window(self) -> int:
        """Items that may be under way: the smaller of the two windows."""
        if self.peer_hello is None:
            return self.hello.window
        return min(self.hello.window, self.peer_hello.window)

    # ---- events of the socket --------------------------------------------------------------------

    def on_connected(self) -> None:
        """Handle a new connection of a connecting end: send HELLO, unless a peer has answered already."""
        if not self.binds and self.phase is Phase.WAITING:
            self._send(Kind.HELLO, _encode_hello(self.hello))

    def on_disconnected(self, reason: str = "its connection closed without an end of the stream") -> None:
        """Handle the loss of the connection to the peer."""
        self.disconnected = True
        if self.phase in (Phase.OPEN, Phase.ENDING):
            self._enter_broken(f"the {self._other_role} is gone: {reason}")

    def on_message(self, origin: MessageOrigin, frames: Sequence[Buffer]) -> None:
        """Handle a message of the peer or of an unknown process."""
        is_peer = self.peer is not None and origin.routing_id == self.peer.routing_id
        try:
            check_sizes([len(frame) for frame in frames], self.limits)
            header = parse_header(next(iter(frames), b""))  # a message without frames has no header
            if self.peer is None or (self.binds and not is_peer):
                self._on_handshake(origin, header, frames)
            elif header.version != WIRE_VERSION:
                raise WireError(f"wire version {header.version} after a handshake of version {WIRE_VERSION}")
            else:
                self._on_peer_message(header, frames)
        except WireError as error:
            if not is_peer:
                self.unknown_peers += 1
            elif self.phase in (Phase.OPEN, Phase.ENDING):
                self.fail(str(error))

    def fail(self, reason: str) -> None:
        """Break the stream from this side and send ``reason`` to the peer. A finished stream stays as it is."""
        if self.finished:
            return
        if self.peer is not None:
            self.disconnected = False
            self._send(Kind.BROKEN, _reason_bytes(reason))
        self._enter_broken(reason)

    # ---- handshake -------------------------------------------------------------------------------

    def _on_handshake(self, origin: MessageOrigin, header: Header, frames: Sequence[Buffer]) -> None:
        if self.finished:
            return  # meant for the next stream at this endpoint: the sender connects again when this socket closes
        if not self.binds:
            self._on_answer(origin, header, frames)
        elif header.kind not in (Kind.HELLO, Kind.READY):
            self.unknown_peers += 1
        elif self.peer is not None:
            self._refuse(origin, f"the stream is in use by another {self._other_role}: one sender, one receiver")
        elif mismatch := self._mismatch(header, frames):
            self._refuse(origin, mismatch)
            self._enter_broken(mismatch)
        elif stale := self._stale(_hello(frames)):
            self._refuse(origin, stale)  # and go on waiting for the peer of the current start
        elif header.kind == Kind.HELLO:
            answer = replace(self.hello, session=_hello(frames).session)
            self._send(Kind.WELCOME, _encode_hello(answer), to=origin.routing_id)
        else:
            self._adopt(origin, _hello(frames))

    def _on_answer(self, origin: MessageOrigin, header: Header, frames: Sequence[Buffer]) -> None:
        if header.kind == Kind.REFUSED:
            self._enter_broken(f"refused by the {self._other_role}: {_reason(frames)}")
        elif header.kind != Kind.WELCOME:
            self.unknown_peers += 1
        elif mismatch := self._mismatch(header, frames):
            self._enter_broken(mismatch)
        elif (hello := _hello(frames)).session == self.hello.session:
            self._send(Kind.READY, _encode_hello(self.hello))
            self._adopt(origin, hello)

    def _mismatch(self, header: Header, frames: Sequence[Buffer]) -> str:
        """Reason why the sender of ``frames`` cannot have the other end of the stream; empty where it can."""
        if header.version != WIRE_VERSION:
            return f"wire version {header.version} at one end, {WIRE_VERSION} at the other: install the same streamrl"
        hello = self.hello
        peer = _hello(frames)
        if peer.item_type != hello.item_type:
            return f"the {peer.role} carries {peer.item_type}, the {hello.role} {hello.item_type}"
        if peer.role == hello.role:
            return f"both ends are a {hello.role}"
        if peer.byte_order != hello.byte_order:
            return f"the {peer.role} is {peer.byte_order} endian, the {hello.role} {hello.byte_order} endian"
        if peer.window < 1 or peer.message_bytes < 1:
            return f"the {peer.role} announces a window of {peer.window} items, {peer.message_bytes} bytes each"
        return ""

    def _stale(self, peer: Hello) -> str:
        """Reason why a peer of another start of the run is refused; empty for any other. The host of such a peer was
        lost and has come back."""
        epoch = self.hello.epoch
        if not epoch or not peer.epoch or epoch == peer.epoch:
            return ""
        return f"the {peer.role} belongs to start {peer.epoch} of the run, the {self.hello.role} to start {epoch}"

    def _refuse(self, origin: MessageOrigin, reason: str) -> None:
        self._send(Kind.REFUSED, _reason_bytes(reason), to=origin.routing_id)

    def _adopt(self, origin: MessageOrigin, hello: Hello) -> None:
        self.peer = origin
        self.peer_hello = hello
        self.disconnected = False
        self.phase = Phase.OPEN
        self._on_open()

    # ---- messages of the peer --------------------------------------------------------------------

    def _on_peer_message(self, header: Header, frames: Sequence[Buffer]) -> None:
        match header.kind:
            case Kind.BROKEN | Kind.REFUSED:
                self._send(Kind.GOODBYE)
                self.disconnected = True
                if not self.finished:
                    self._enter_broken(f"broken by the {self._other_role}: {_reason(frames)}")
            case Kind.GOODBYE if self.phase is not Phase.OPEN:
                self._on_goodbye()
            case Kind.HELLO | Kind.WELCOME | Kind.READY:
                pass  # repeated after a reconnect inside the handshake
            case _ if not self.finished:
                self._on_stream_message(header, frames)
            case Kind.BYE:
                self.disconnected = True
            case _:
                pass  # items and credit that crossed our BROKEN

    def _on_goodbye(self) -> None:
        self.disconnected = True

    @abstractmethod
    def _on_open(self) -> None: ...

    @abstractmethod
    def _on_stream_message(self, header: Header, frames: Sequence[Buffer]) -> None: ...

    @property
    def _other_role(self) -> StreamRole:
        return StreamRole.RECEIVER if self.hello.role is StreamRole.SENDER else StreamRole.SENDER

    def _enter_broken(self, reason: str) -> None:
        self.phase = Phase.BROKEN
        self.reason = reason

    def _send(self, kind: Kind, *content: Buffer, sequence: int = 0, to: bytes | None = None) -> None:
        """Send a message to the peer, or to the process with the routing id ``to``."""
        if to is None:
            to = self.peer.routing_id if self.peer else _NO_ROUTING_ID
        self._transmit(to, [pack_header(kind, sequence), *content])


class SendingEnd(StreamEnd):
    """The sender's half: counts credit, numbers items."""

    sent_items = 0
    taken_items = 0
    has_credit = False
    _ends_early = False

    @property
    def credit(self) -> int:
        """Items that may be sent now."""
        if self.phase is not Phase.OPEN or not self.has_credit:
            return 0
        return self.window - (self.sent_items - self.taken_items)

    def send_item(self, content: Sequence[Buffer]) -> None:
        """Send one encoded item. The caller has made sure that there is ``credit``."""
        self._send(Kind.ITEM, *content, sequence=self.sent_items)
        self.sent_items += 1

    def end(self) -> None:
        """Send END: no item follows. While no peer has connected, END waits for one."""
        self._ends_early = self.phase is Phase.WAITING
        if self.phase is Phase.OPEN:
            self.phase = Phase.ENDING
            self._send(Kind.END, sequence=self.sent_items)

    def _on_open(self) -> None:
        pass  # the receiver sends first: CREDIT 0 means that it has accepted this end

    def _on_goodbye(self) -> None:
        if self.phase is Phase.ENDING:
            self.phase = Phase.ENDED
            self._send(Kind.BYE)
        self.disconnected = True

    def _on_stream_message(self, header: Header, frames: Sequence[Buffer]) -> None:
        if header.kind != Kind.CREDIT:
            raise WireError(f"a receiver does not send messages of kind {header.kind}")
        if not self.taken_items <= header.sequence <= self.sent_items:
            possible = f"between {self.taken_items} and {self.sent_items} were possible"
            raise WireError(f"credit for {header.sequence} items, {possible}")
        self.taken_items = header.sequence
        self.has_credit = True
        if self._ends_early:
            self.end()


class ReceivingEnd(StreamEnd):
    """The receiver's half: checks sequence numbers, keeps items until they are taken, grants credit."""

    received_items = 0
    taken_items = 0
    _granted = 0

    def __init__(self, hello: Hello, *, binds: bool, limits: WireLimits, transmit: Transmit) -> None:
        super().__init__(hello, binds=binds, limits=limits, transmit=transmit)
        self.items: deque[Sequence[Buffer]] = deque()

    def take(self) -> None:
        """Remove the first of ``items``, which the application has taken. Sends credit in portions, at once where the
        sender may wait for it."""
        self.items.popleft()
        self.taken_items += 1
        portion = max(1, self.window // 4)
        if self.phase is Phase.OPEN and (not self.items or self.taken_items - self._granted >= portion):
            self._granted = self.taken_items
            self._send(Kind.CREDIT, sequence=self.taken_items)

    def _on_open(self) -> None:
        self._send(Kind.CREDIT, sequence=0)

    def _on_stream_message(self, header: Header, frames: Sequence[Buffer]) -> None:
        if header.kind not in (Kind.ITEM, Kind.END):
            raise WireError(f"a sender does not send messages of kind {header.kind}")
        if header.sequence != self.received_items:
            raise WireError(f"item {self.received_items} was next and {Kind(header.kind).name} {header.sequence} came")
        if header.kind == Kind.END:
            self.phase = Phase.ENDED
            self._send(Kind.GOODBYE)
        elif self.received_items - self.taken_items >= self.window:
            raise WireError(f"the sender is more than its window of {self.window} items ahead")
        else:
            self.items.append(frames[1:])
            self.received_items += 1


def _hello(frames: Sequence[Buffer]) -> Hello:
    try:
        return _decode_hello(frames[1])
    except (IndexError, *UNDECODABLE) as error:
        raise WireError(f"a handshake without a hello: {error}") from error


def _reason(frames: Sequence[Buffer]) -> str:
    if len(frames) < 2:
        return "no reason given"
    return bytes(frames[1])[:REASON_BYTES].decode("utf-8", "replace")


def _reason_bytes(reason: str) -> bytes:
    return reason.encode("utf-8", "replace")[:REASON_BYTES]
