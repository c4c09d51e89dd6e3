"""Requests of a receiver to a publisher, the replies, and their sockets. One request is one credit: it is answered
once.

A reply has two frames: the encoded header, and the bytes asked for (empty for ``NotServed``). The ZeroMQ context is not
shared with the streams: the trainer publishes from a plain thread, and the receiver lives in vLLM's worker process,
which uses ZeroMQ itself."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import zmq

from streamrl.base.errors import UNDECODABLE, WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.comm.guarded_sockets import GuardedContext
from streamrl.comm.socket_options import make_socket
from streamrl.comm.zmq_sockets import transport_of

CHUNK_BYTES = 1 << 20
MANIFEST_LIMIT = 64 << 20
MANIFEST = -1
"""The piece of a part that is its manifest; its chunks are the pieces from 0 on."""


class GetPiece(msgspec.Struct, frozen=True):
    """Ask for a piece of the part with this manifest digest."""

    manifest_digest: str
    piece: int


class Piece(msgspec.Struct, frozen=True, tag=True):
    """Header of the frame with one piece."""

    manifest_digest: str
    piece: int


class NotServed(msgspec.Struct, frozen=True, tag=True):
    """The publisher does not hold what was asked for (any more)."""

    manifest_digest: str
    reason: str


Reply = Piece | NotServed
Kind = TypeVar("Kind")

REQUEST_LIMIT = 4096
encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(GetPiece)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_announcement_decoder = msgspec.msgpack.Decoder(WeightAnnouncement)


def decode_request(frame: bytes | memoryview) -> GetPiece:
    """Raises ``WeightError`` for anything else."""
    return _decoded(_request_decoder, frame)


def decode_reply(frame: bytes | memoryview) -> Reply:
    """Raises ``WeightError`` for anything else."""
    return _decoded(_reply_decoder, frame)


def decode_announcement(encoded: bytes | memoryview) -> WeightAnnouncement:
    """Decode the announcement that an engine gives its workers. Raises ``WeightError`` for anything else."""
    return _decoded(_announcement_decoder, encoded)


def _decoded(decoder: msgspec.msgpack.Decoder[Kind], frame: bytes | memoryview) -> Kind:
    try:
        return decoder.decode(frame)
    except UNDECODABLE as error:
        raise WeightError(f"not a message of this version: {error}") from error


def pull_socket(context: GuardedContext, kind: int, endpoint: str, *, max_frame_bytes: int) -> zmq.Socket[bytes]:
    """A socket that drops what is unsent when it is closed, and whose peer is cut off above ``max_frame_bytes``."""
    transport_of(endpoint)
    return make_socket(context, kind, endpoint=endpoint, max_frame_bytes=max_frame_bytes)
