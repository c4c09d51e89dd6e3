"""Messages between the two ends of a ZeroMQ stream, as state machines without sockets, clocks or tasks.

::

    connecting end            binding end
      HELLO      ->                            who I am: item type, role, window, session
                 <-  WELCOME | REFUSED         the same of the other end, for that session
      READY      ->                            now both ends are open
    sender                    receiver
                 <-  CREDIT n                  the application has taken n items; first with n = 0
      ITEM n     ->                            never more than the window ahead of the last credit
      END n      ->                            n items were all
                 <-  GOODBYE                   END (or BROKEN) has arrived
      BYE        ->                            GOODBYE has arrived, the sockets may go
      BROKEN     <->                           either end, at any time, with the reason; answered by GOODBYE

The number of ITEM, CREDIT and END is the sequence number of the header. HELLO, WELCOME and READY carry a ``Hello``,
REFUSED and BROKEN a reason in UTF-8: these two are understood across versions."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum, StrEnum

import msgspec

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
    """``WAITING`` for a peer, ``OPEN``, ``ENDING`` (sender: END is out), ``ENDED``, ``BROKEN``."""

    WAITING = "waiting"
    OPEN = "open"
    ENDING = "ending"
    ENDED = "ended"
    BROKEN = "broken"


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Handshake of one end. ``session`` names the connecting end's life; ``message_bytes`` is the most it accepts;
    ``epoch``: number of the start of the run that it belongs to (0: any)."""

    item_type: str
    role: StreamRole
    window: int
    message_bytes: int
    session: str
    name: str = ""
    epoch: int = 0
    byte_order: str = sys.byteorder


class MessageOrigin(msgspec.Struct, frozen=True):
    """Sender of a message: routing id (empty on a DEALER), number of the connection (None: it is closed)."""

    peer: bytes
    connection: int | None


Transmit = Callable[[bytes, Sequence[Buffer]], None]

_encode_hello = msgspec.msgpack.Encoder().encode
_decode_hello = msgspec.msgpack.Decoder(Hello).decode


class StreamEnd(ABC):
    """Common part of both ends: handshake, breaking, parting. ``transmit(peer, frames)`` hands a message to the socket
    and never waits. After any call ``phase``, ``reason`` and ``disconnected`` (nothing more will come from the peer and
    it needs nothing more) may have changed."""

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
        """Messages ignored because they did not come from the peer."""
        self._transmit = transmit

    @property
    def finished(self) -> bool:
        """Return whether the stream can pass no more items."""
        return self.phase in (Phase.ENDED, Phase.BROKEN)

    @property
    def window(self) -> int:
        """Items that may be under way: the smaller of the two windows."""
        other = self.peer_hello.window if self.peer_hello else self.hello.window
        return min(self.hello.window, other)

    # ---- what happens ----------------------------------------------------------------------------

    def on_connected(self) -> None:
        """A connecting end has a connection (again): say hello until somebody answers."""
        if not self.binds and self.phase is Phase.WAITING:
            self._send(Kind.HELLO, _encode_hello(self.hello))

    def on_disconnected(self) -> None:
        """The connection to the peer is gone."""
        self.disconnected = True
        if self.phase in (Phase.OPEN, Phase.ENDING):
            self._enter_broken(f"the {self._other_role} is gone: its connection closed without an end of the stream")

    def on_message(self, origin: MessageOrigin, frames: Sequence[Buffer]) -> None:
        """A message has arrived, from the peer or a stranger."""
        is_peer = self.peer is not None and origin.peer == self.peer.peer
        try:
            check_sizes([len(frame) for frame in frames], self.limits)
            header = parse_header(frames[0] if frames else b"")
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
        """Break the stream from this side, and send the peer the reason. Does nothing to a finished stream."""
        if self.finished:
            return
        if self.peer is not None:
            self.disconnected = False
            self._send(Kind.BROKEN, _reason_bytes(reason))
        self._enter_broken(reason)

    # ---- handshake -------------------------------------------------------------------------------

    def _on_handshake(self, origin: MessageOrigin, header: Header, frames: Sequence[Buffer]) -> None:
        if self.finished:
            return  # a peer for the next stream at this endpoint: it connects again when this socket closes
        if not self.binds:
            self._on_answer(origin, header, frames)
        elif header.kind not in (Kind.HELLO, Kind.READY):
            self.unknown_peers += 1
        elif self.peer is not None:
            self._refuse(origin, f"the stream is in use by another {self._other_role}: one sender, one receiver")
        elif mismatch := self._mismatch(header, frames):
            self._refuse(origin, mismatch)
            self._enter_broken(mismatch)
        elif stale := self._stale(_hello(frames)):  # and this end goes on waiting for its peer
            self._refuse(origin, stale)
        elif header.kind == Kind.HELLO:
            session = _hello(frames).session
            self._send(Kind.WELCOME, self._hello_for(session), to=origin.peer)
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

    def _hello_for(self, session: str) -> bytes:
        return _encode_hello(msgspec.structs.replace(self.hello, session=session))

    def _mismatch(self, header: Header, frames: Sequence[Buffer]) -> str:
        """Return why this peer cannot have the other end of the stream; empty where it can."""
        if header.version != WIRE_VERSION:
            return f"wire version {header.version} at one end, {WIRE_VERSION} at the other: install the same streamrl"
        mine = self.hello
        other = _hello(frames)
        if other.item_type != mine.item_type:
            return f"the {other.role} carries {other.item_type}, the {mine.role} {mine.item_type}"
        if other.role == mine.role:
            return f"both ends are a {mine.role}"
        if other.byte_order != mine.byte_order:
            return f"the {other.role} is {other.byte_order} endian, the {mine.role} {mine.byte_order} endian"
        if other.window < 1 or other.message_bytes < 1:
            return f"the {other.role} announces a window of {other.window} items, {other.message_bytes} bytes each"
        return ""

    def _stale(self, other: Hello) -> str:
        """Return why a peer of another start of the run is refused: of a host that was lost and has come back."""
        mine = self.hello.epoch
        if not mine or not other.epoch or mine == other.epoch:
            return ""
        return f"the {other.role} belongs to start {other.epoch} of the run, the {self.hello.role} to start {mine}"

    def _refuse(self, origin: MessageOrigin, reason: str) -> None:
        self._send(Kind.REFUSED, _reason_bytes(reason), to=origin.peer)

    def _adopt(self, origin: MessageOrigin, hello: Hello) -> None:
        self.peer = origin
        self.peer_hello = hello
        self.disconnected = False
        self.phase = Phase.OPEN
        self._on_open()

    # ---- with the peer ---------------------------------------------------------------------------

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
                pass  # said twice after a reconnect inside the handshake
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
        peer = to if to is not None else (self.peer.peer if self.peer else b"")
        self._transmit(peer, [pack_header(kind, sequence), *content])


class SendingEnd(StreamEnd):
    """The sender's half: counts credit, numbers items."""

    sent = 0
    taken = 0
    has_credit = False
    _ends_early = False

    @property
    def credit(self) -> int:
        """Items that may be sent now."""
        if self.phase is not Phase.OPEN or not self.has_credit:
            return 0
        return self.window - (self.sent - self.taken)

    def send_item(self, content: Sequence[Buffer]) -> None:
        """Send one encoded item. The caller has looked at ``credit``."""
        self._send(Kind.ITEM, *content, sequence=self.sent)
        self.sent += 1

    def end(self) -> None:
        """Say that no item follows; to a peer that is not there yet, when it comes."""
        self._ends_early = self.phase is Phase.WAITING
        if self.phase is Phase.OPEN:
            self.phase = Phase.ENDING
            self._send(Kind.END, sequence=self.sent)

    def _on_open(self) -> None:
        pass  # the receiver speaks first: CREDIT 0 says that it has accepted this end

    def _on_goodbye(self) -> None:
        if self.phase is Phase.ENDING:
            self.phase = Phase.ENDED
            self._send(Kind.BYE)
        self.disconnected = True

    def _on_stream_message(self, header: Header, frames: Sequence[Buffer]) -> None:
        if header.kind != Kind.CREDIT:
            raise WireError(f"a receiver does not send messages of kind {header.kind}")
        if not self.taken <= header.sequence <= self.sent:
            raise WireError(f"credit for {header.sequence} items, between {self.taken} and {self.sent} were possible")
        self.taken = header.sequence
        self.has_credit = True
        if self._ends_early:
            self.end()


class ReceivingEnd(StreamEnd):
    """The receiver's half: checks sequence numbers, keeps items until they are taken, grants credit."""

    received = 0
    taken = 0
    _granted = 0

    def __init__(self, hello: Hello, *, binds: bool, limits: WireLimits, transmit: Transmit) -> None:
        super().__init__(hello, binds=binds, limits=limits, transmit=transmit)
        self.items: deque[Sequence[Buffer]] = deque()

    def take(self) -> None:
        """The first of ``items`` was taken. Credit goes back in portions, at once where the sender may wait for it."""
        self.items.popleft()
        self.taken += 1
        if self.phase is Phase.OPEN and (not self.items or self.taken - self._granted >= max(1, self.window // 4)):
            self._granted = self.taken
            self._send(Kind.CREDIT, sequence=self.taken)

    def _on_open(self) -> None:
        self._send(Kind.CREDIT, sequence=0)

    def _on_stream_message(self, header: Header, frames: Sequence[Buffer]) -> None:
        if header.kind not in (Kind.ITEM, Kind.END):
            raise WireError(f"a sender does not send messages of kind {header.kind}")
        if header.sequence != self.received:
            raise WireError(f"item {self.received} was next and {Kind(header.kind).name} {header.sequence} came")
        if header.kind == Kind.END:
            self.phase = Phase.ENDED
            self._send(Kind.GOODBYE)
        elif self.received - self.taken >= self.window:
            raise WireError(f"the sender is more than its window of {self.window} items ahead")
        else:
            self.items.append(frames[1:])
            self.received += 1


def _hello(frames: Sequence[Buffer]) -> Hello:
    try:
        return _decode_hello(frames[1])
    except (IndexError, *UNDECODABLE) as error:
        raise WireError(f"a handshake without a hello: {error}") from error


def _reason(frames: Sequence[Buffer]) -> str:
    return bytes(frames[1])[:REASON_BYTES].decode("utf-8", "replace") if len(frames) > 1 else "no reason given"


def _reason_bytes(reason: str) -> bytes:
    return reason.encode("utf-8", "replace")[:REASON_BYTES]
