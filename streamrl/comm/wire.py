"""Encoding of items to frames and decoding of frames to items.

Both ends of a ``zmq_stream`` use it, in every process, and the control socket (``launch.control_protocol``);
``OneFrameCodec`` encodes files of our own (journal, checkpoints). A message is a list of frames::

    [header] [body] [raw 0] [raw 1] ...

``header``  16 bytes: magic, ``WIRE_VERSION``, kind, reserved, sequence number (see ``Header``)
``body``    msgpack of the item; an array inside it is an extension value
``raw i``   the bytes of one large array, sent without a copy

An ``array.array`` below ``RAW_FRAME_BYTES`` is stored in the body: extension ``INLINE_ARRAY``, its type code and its
elements. A larger one is extension ``RAW_ARRAY``, its type code and the index of its raw frame. Raw frames are used in
order, each exactly once, so that a small body cannot refer to the same large frame many times. Elements are in the byte
order of the sender; the handshake refuses a peer with another order. ``bytes`` are part of the body (msgspec has no
hook for them) and are copied once on each side.

Decoding any bytes gives an item or raises ``WireError``. Sizes are checked before anything is decoded."""

from __future__ import annotations

import struct
import types
import typing
from array import array
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

from msgspec import Struct, msgpack

from streamrl.base.errors import UNDECODABLE, WireError
from streamrl.comm.decoded_size import SPARE_BYTES, takes_more

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

WIRE_VERSION = 1
"""Version of everything on a stream: header, handshake, message structs. Raise it when an old peer would misread a new
one."""

MAGIC = b"SRLW"
RAW_FRAME_BYTES = 64 * 1024
"""Arrays of at least this many bytes get their own frame (pyzmq copies smaller frames anyway)."""

INLINE_ARRAY = 1
RAW_ARRAY = 2

ARRAY_ITEM_SIZES = {"b": 1, "B": 1, "h": 2, "H": 2, "i": 4, "I": 4, "q": 8, "Q": 8, "f": 4, "d": 8}
"""Type codes allowed in messages, and the bytes of one element. ``l``, ``L`` and ``u`` differ between platforms."""

_HEADER = struct.Struct("<4sHBBQ")  # never changes: a peer of another version must be able to read the header
HEADER_BYTES = _HEADER.size
_RAW_INDEX = struct.Struct("<I")


class WireLimits(Struct, frozen=True, kw_only=True):
    """Limits of one message, checked before it is decoded.

    ``body_growth``: number of times its size that a decoded body may take, plus ``decoded_size.SPARE_BYTES`` (0: no
    limit, for bytes that this process wrote itself). A body of empty lists grows about seventyfold; raw frames do not
    grow."""

    message_bytes: int = 256 * 1024 * 1024
    frame_bytes: int = 256 * 1024 * 1024
    body_bytes: int = 64 * 1024 * 1024
    frames: int = 1024
    body_growth: int = 8


class Header(NamedTuple):
    """First frame of every message. ``kind`` is a ``stream_protocol.Kind``."""

    version: int
    kind: int
    sequence: int


def pack_header(kind: int, sequence: int = 0, version: int = WIRE_VERSION) -> bytes:
    """The header frame of a message."""
    return _HEADER.pack(MAGIC, version, kind, 0, sequence)


def parse_header(frame: Buffer) -> Header:
    """Read a header of any version. Raises ``WireError`` where the bytes are not a header."""
    if len(frame) != _HEADER.size:
        raise WireError(f"a message header has {_HEADER.size} bytes, this one {len(frame)}: the peer is not streamrl")
    magic, version, kind, _reserved, sequence = _HEADER.unpack(frame)
    if magic != MAGIC:
        raise WireError(f"a message begins with {MAGIC!r}, this one with {magic!r}: the peer is not streamrl")
    return Header(version, kind, sequence)


def check_sizes(sizes: Sequence[int], limits: WireLimits) -> int:
    """Total bytes of a message whose frames, header included, have these ``sizes``. Raises ``WireError`` over a
    limit."""
    if len(sizes) > limits.frames:
        raise WireError(f"a message of {len(sizes)} frames is over the limit of {limits.frames} frames")
    largest = max(sizes, default=0)
    if largest > limits.frame_bytes:
        raise WireError(f"a frame of {largest} bytes is over the limit of {limits.frame_bytes} bytes")
    if len(sizes) > 1 and sizes[1] > limits.body_bytes:
        raise WireError(f"a message body of {sizes[1]} bytes is over the limit of {limits.body_bytes} bytes")
    total = sum(sizes)
    if total > limits.message_bytes:
        raise WireError(f"a message of {total} bytes is over the limit of {limits.message_bytes} bytes")
    return total


def item_type_name(item_type: Any) -> str:
    """Name of an item type in a handshake: its class name; for a union all names, sorted and joined."""
    members = _union_members(item_type)
    return " | ".join(sorted(member.__name__ if _is_plain_class(member) else str(member) for member in members))


def _union_members(item_type: Any) -> tuple[Any, ...]:
    if isinstance(item_type, types.UnionType) or typing.get_origin(item_type) is typing.Union:
        return typing.get_args(item_type)
    return (item_type,)


def _is_plain_class(member: Any) -> bool:
    return isinstance(member, type) and not typing.get_args(member)


def _record_types(item_type: Any) -> tuple[type, ...] | None:
    """Classes that an item may have. None where the type does not consist of plain classes: then the class of an item
    is not checked."""
    members = _union_members(item_type)
    if all(_is_plain_class(member) for member in members):
        return cast("tuple[type, ...]", members)
    return None


class WireCodec(Generic[T]):
    """Encoder and decoder of items of one type. Not for two threads at once."""

    def __init__(
        self, item_type: Any, limits: WireLimits | None = None, raw_frame_bytes: int = RAW_FRAME_BYTES
    ) -> None:
        self.limits = limits or WireLimits()
        self.item_type_name = item_type_name(item_type)
        self._item_types = _record_types(item_type)
        self._raw_frame_bytes = raw_frame_bytes
        self._encoder = msgpack.Encoder(enc_hook=self._encode_array)
        self._decoder = msgpack.Decoder(item_type, ext_hook=self._decode_array)
        self._outgoing: list[Buffer] = []
        self._incoming: Sequence[Buffer] = ()
        self._incoming_used = 0

    def encode(self, item: T) -> list[Buffer]:
        """Body and raw frames of an item, without header. The raw frames share memory with the item's arrays. Raises
        ``WireError`` where the item is of another type, holds a value that msgpack cannot encode, or is over a
        limit."""
        if self._item_types is not None and not isinstance(item, self._item_types):
            raise WireError(f"an item of type {type(item).__name__} on a stream of {self.item_type_name}")
        self._outgoing = []
        try:
            body = self._encoder.encode(item)
            frames = [body, *self._outgoing]
        except UNDECODABLE as error:
            raise WireError(f"a {type(item).__name__} cannot be encoded: {type(error).__name__}: {error}") from error
        finally:
            self._outgoing = []
        check_sizes([_HEADER.size, *(len(frame) for frame in frames)], self.limits)
        return frames

    def decode(self, frames: Sequence[Buffer]) -> T:
        """The item in a body and raw frames, without header. Raises ``WireError``, and nothing else, on bad bytes."""
        check_sizes([_HEADER.size, *(len(frame) for frame in frames)], self.limits)
        if not frames:
            raise WireError(f"a message without a body on a stream of {self.item_type_name}")
        growth = self.limits.body_growth
        if growth and takes_more(frames[0], growth * len(frames[0]) + SPARE_BYTES):
            raise WireError(
                f"a body of {len(frames[0])} bytes would take more than {growth} times that in memory: it is made of "
                "very many small values; keep them in fewer and longer texts or arrays"
            )
        self._incoming = frames[1:]
        self._incoming_used = 0
        try:
            item = self._decoder.decode(frames[0])
            unused = len(self._incoming) - self._incoming_used
        except UNDECODABLE as error:
            raise WireError(f"not a {self.item_type_name}: {type(error).__name__}: {error}") from error
        finally:
            self._incoming = ()
        if unused:
            raise WireError(f"{unused} raw frames of a {self.item_type_name} belong to no array")
        return cast("T", item)

    def _encode_array(self, value: Any) -> msgpack.Ext:
        if not isinstance(value, array):
            raise TypeError(f"objects of type {type(value).__name__} do not travel on streams")
        if value.typecode not in ARRAY_ITEM_SIZES:
            raise TypeError(f"arrays of type {value.typecode!r} do not travel, only {''.join(ARRAY_ITEM_SIZES)}")
        code = value.typecode.encode()
        # Header and body are the other two frames. An array stays in the body where a frame of its own would be one too
        # many for the limit.
        if value.itemsize * len(value) < self._raw_frame_bytes or len(self._outgoing) + 2 >= self.limits.frames:
            return msgpack.Ext(INLINE_ARRAY, code + value.tobytes())
        self._outgoing.append(memoryview(value).cast("B"))
        return msgpack.Ext(RAW_ARRAY, code + _RAW_INDEX.pack(len(self._outgoing) - 1))

    def _decode_array(self, kind: int, content: memoryview) -> array[Any]:
        code = bytes(content[:1]).decode("latin-1")
        if code not in ARRAY_ITEM_SIZES:
            raise ValueError(f"array type {code!r} is not one of {''.join(ARRAY_ITEM_SIZES)}")
        if kind == INLINE_ARRAY:
            elements: Buffer = content[1:]
        elif kind == RAW_ARRAY and len(content) == 1 + _RAW_INDEX.size:
            elements = self._next_raw_frame(_RAW_INDEX.unpack(content[1:])[0])
        else:
            raise ValueError(f"extension {kind} of {len(content)} bytes is not an array")
        value = array(code)
        if value.itemsize != ARRAY_ITEM_SIZES[code] or len(elements) % value.itemsize:
            raise ValueError(f"{len(elements)} bytes are not an array of type {code!r}")
        value.frombytes(elements)
        return value

    def _next_raw_frame(self, index: int) -> Buffer:
        if index != self._incoming_used or index >= len(self._incoming):
            raise ValueError(f"raw frame {index} was asked for, {self._incoming_used} of {len(self._incoming)} is next")
        self._incoming_used += 1
        return self._incoming[index]


_UNLIMITED = 1 << 40


class OneFrameCodec(Generic[T]):
    """Encoder and decoder of items as single bytes objects, arrays included, for files that this run wrote itself.
    Sizes have no limit, since no other process sends them."""

    def __init__(self, item_type: Any) -> None:
        limits = WireLimits(message_bytes=_UNLIMITED, frame_bytes=_UNLIMITED, body_bytes=_UNLIMITED, body_growth=0)
        self._codec: WireCodec[T] = WireCodec(item_type, limits, raw_frame_bytes=_UNLIMITED)

    def encode(self, item: T) -> bytes:
        """The bytes of an item. Raises ``WireError`` as ``WireCodec.encode``."""
        (body,) = self._codec.encode(item)
        return bytes(body)

    def decode(self, body: Buffer) -> T:
        """The item in ``body``. Raises ``WireError``, and nothing else, on bad bytes."""
        return self._codec.decode([body])
