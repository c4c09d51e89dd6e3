"""What a receiver asks a publisher, and what it gets. One request is one credit: it is answered once.

A reply has two frames: the encoded header, and the bytes asked for (empty for ``NotServed``).
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from streamrl.errors import WeightError


class GetManifest(msgspec.Struct, frozen=True, tag=True):
    """Ask for the manifest with this digest."""

    manifest_digest: str


class GetChunk(msgspec.Struct, frozen=True, tag=True):
    """Ask for chunk number ``chunk`` of the part with this manifest digest."""

    manifest_digest: str
    chunk: int


class ManifestReply(msgspec.Struct, frozen=True, tag=True):
    """Header of the frame with the manifest."""

    manifest_digest: str


class ChunkReply(msgspec.Struct, frozen=True, tag=True):
    """Header of the frame with one chunk."""

    manifest_digest: str
    chunk: int


class NotServed(msgspec.Struct, frozen=True, tag=True):
    """The publisher does not hold what was asked for (any more)."""

    manifest_digest: str
    reason: str


Request = GetManifest | GetChunk
Reply = ManifestReply | ChunkReply | NotServed
Kind = TypeVar("Kind")

REQUEST_LIMIT = 4096
encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_request(frame: bytes | memoryview) -> Request:
    """Raises ``WeightError`` for anything else."""
    return _decoded(_request_decoder, frame)


def decode_reply(frame: bytes | memoryview) -> Reply:
    """Raises ``WeightError`` for anything else."""
    return _decoded(_reply_decoder, frame)


def _decoded(decoder: msgspec.msgpack.Decoder[Kind], frame: bytes | memoryview) -> Kind:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WeightError(f"not a message of this version: {error}") from error
