"""Requests of a receiver for manifests and chunks, the publisher's replies, and the sockets of both.

``publish.server`` answers in a trainer rank's process; ``pull.fetch`` asks in vLLM's worker processes, and
``relay`` does both in the engine's process. One request is one credit: each is answered once, by two frames, the
encoded header and the payload (empty for ``NotServed``). The ZeroMQ context is not the one of the streams: the trainer
publishes from a plain thread, and vLLM's worker uses ZeroMQ itself."""

from __future__ import annotations

from typing import TypeVar

import zmq
from msgspec import Struct, msgpack

from streamrl.base.errors import UNDECODABLE, WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.comm.guarded_sockets import GuardedContext
from streamrl.comm.socket_options import ByteSocket, make_socket
from streamrl.comm.zmq_sockets import transport_of

CHUNK_BYTES = 1 << 20
MANIFEST_LIMIT = 64 << 20
MANIFEST = -1
"""Number of the piece that is the manifest of a part. The chunks of the part are the pieces from 0 on."""


class GetPiece(Struct, frozen=True):
    """Request for one piece of the part with this manifest digest."""

    manifest_digest: str
    piece: int


class Piece(Struct, frozen=True, tag=True):
    """Header of a reply whose payload is the piece."""

    manifest_digest: str
    piece: int


class NotServed(Struct, frozen=True, tag=True):
    """Header of a reply of a publisher that does not hold the piece (any more)."""

    manifest_digest: str
    reason: str


Reply = Piece | NotServed
Message = TypeVar("Message")

REQUEST_LIMIT = 4096
encoder = msgpack.Encoder()
_request_decoder = msgpack.Decoder(GetPiece)
_reply_decoder: msgpack.Decoder[Reply] = msgpack.Decoder(Reply)
_announcement_decoder = msgpack.Decoder(WeightAnnouncement)


def decode_request(frame: bytes | memoryview) -> GetPiece:
    """Decode a request. Raises ``WeightError`` for other bytes."""
    return _decoded(_request_decoder, frame)


def decode_reply(frame: bytes | memoryview) -> Reply:
    """Decode the header of a reply. Raises ``WeightError`` for other bytes."""
    return _decoded(_reply_decoder, frame)


def decode_announcement(encoded: bytes | memoryview) -> WeightAnnouncement:
    """Decode the announcement that an engine gives its workers. Raises ``WeightError`` for other bytes."""
    return _decoded(_announcement_decoder, encoded)


def _decoded(decoder: msgpack.Decoder[Message], frame: bytes | memoryview) -> Message:
    try:
        return decoder.decode(frame)
    except UNDECODABLE as error:
        raise WeightError(f"not a message of this version: {error}") from error


def send_reply(router: ByteSocket, peer: bytes, reply: Struct, payload: bytes | memoryview) -> None:
    """Send a reply to the process with the identity ``peer``. It is dropped where the process has left, or its queue is
    full: a process that is alive repeats its request."""
    try:
        router.send_multipart([peer, encoder.encode(reply), payload], zmq.NOBLOCK, copy=False)
    except zmq.ZMQError as error:
        if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise


def pull_socket(context: GuardedContext, kind: int, endpoint: str, *, max_frame_bytes: int) -> ByteSocket:
    """Make a socket that drops unsent frames when it is closed, and disconnects a peer that sends a larger frame than
    ``max_frame_bytes``."""
    transport_of(endpoint)
    return make_socket(context, kind, endpoint=endpoint, max_frame_bytes=max_frame_bytes)
