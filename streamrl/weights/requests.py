"""What a receiver asks a publisher, and what it gets. One request is one credit: it is answered once.

A reply has two frames: the encoded header, and the bytes asked for (empty for ``NotServed``).
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from streamrl.base.errors import UNDECODABLE, WeightError
from streamrl.base.messages import WeightAnnouncement


class GetManifest(msgspec.Struct, frozen=True, tag=True):
    """Ask for the manifest with this digest."""

    manifest_digest: str


class GetChunk(msgspec.Struct, frozen=True, tag=True):
    """Ask for chunk number ``chunk`` of the part with this manifest digest."""

    manifest_digest: str
    chunk: int


class GetFold(msgspec.Struct, frozen=True, tag=True):
    """Ask for the version with this manifest digest once more, as one delta on ``base_version``.

    ``base_version`` may be ``manifest.CHECKPOINT_VERSION``: on the checkpoint that publisher and engine began with.
    """

    manifest_digest: str
    base_version: int


class ManifestReply(msgspec.Struct, frozen=True, tag=True):
    """Header of the frame with the manifest."""

    manifest_digest: str


class ChunkReply(msgspec.Struct, frozen=True, tag=True):
    """Header of the frame with one chunk."""

    manifest_digest: str
    chunk: int


class FoldReply(msgspec.Struct, frozen=True, tag=True):
    """Header of the frame with the manifest of a folded delta. ``fold_digest`` is that manifest's digest, which its
    chunks are asked for by; empty while the delta is being made: ask again."""

    manifest_digest: str
    fold_digest: str


class NotServed(msgspec.Struct, frozen=True, tag=True):
    """The publisher does not hold what was asked for (any more)."""

    manifest_digest: str
    reason: str


Request = GetManifest | GetChunk | GetFold
Reply = ManifestReply | ChunkReply | FoldReply | NotServed
Kind = TypeVar("Kind")

REQUEST_LIMIT = 4096
encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_announcement_decoder = msgspec.msgpack.Decoder(WeightAnnouncement)


def decode_request(frame: bytes | memoryview) -> Request:
    """Raises ``WeightError`` for anything else."""
    return _decoded(_request_decoder, frame)


def decode_reply(frame: bytes | memoryview) -> Reply:
    """Raises ``WeightError`` for anything else."""
    return _decoded(_reply_decoder, frame)


def decode_announcement(encoded: bytes | memoryview) -> WeightAnnouncement:
    """What the workers of an engine are handed. Raises ``WeightError`` for anything else."""
    return _decoded(_announcement_decoder, encoded)


def _decoded(decoder: msgspec.msgpack.Decoder[Kind], frame: bytes | memoryview) -> Kind:
    try:
        return decoder.decode(frame)
    except UNDECODABLE as error:
        raise WeightError(f"not a message of this version: {error}") from error
