"""The protocol by itself, without sockets."""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.comm import stream_protocol, wire
from streamrl.comm.stream_protocol import Hello, Kind, StreamRole
from streamrl.comm.wire import WireLimits, pack_header


def test_credit_that_was_never_earned_breaks_the_sender() -> None:
    sent: list[Any] = []
    mine = Hello(item_type="Note", role=StreamRole.SENDER, window=4, message_bytes=100, session="s")
    theirs = msgspec.structs.replace(mine, role=StreamRole.RECEIVER)
    end = stream_protocol.SendingEnd(mine, binds=False, limits=WireLimits(), transmit=lambda _, f: sent.append(f))
    origin = stream_protocol.MessageOrigin(b"", None)
    end.on_connected()
    end.on_message(origin, [pack_header(Kind.WELCOME), msgspec.msgpack.encode(theirs)])
    assert end.credit == 0, "only the first CREDIT says that the receiver has accepted this end"
    end.on_message(origin, [pack_header(Kind.CREDIT, 0)])
    assert end.credit == 4
    end.on_message(origin, [pack_header(Kind.CREDIT, 1)])
    assert end.phase is stream_protocol.Phase.BROKEN
    assert "between 0 and 0" in end.reason
    assert wire.parse_header(sent[-1][0]).kind == Kind.BROKEN
