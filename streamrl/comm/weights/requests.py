"""What a receiver asks a publisher, and what it gets. One request is one credit: it is answered once.

A reply has two frames: the encoded header, and the bytes asked for (empty for ``NotServed``).
"""

from __future__ import annotations

import msgspec


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

REQUEST_LIMIT = 4096
encoder = msgspec.msgpack.Encoder()
request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
