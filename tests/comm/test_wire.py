"""Bytes and items: round trips, and every way in which bytes can be wrong."""

from __future__ import annotations

import struct
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.base import messages
from streamrl.base.errors import WireError
from streamrl.base.types import Record, TokenArray
from streamrl.comm import wire
from streamrl.comm.wire import WireCodec, WireLimits


class Arrays(Record):
    arrays: tuple[TokenArray, ...] = ()
    columns: dict[str, Any] = msgspec.field(default_factory=dict)


class Blob(Record):
    content: bytes
    view: memoryview | None = None


TYPECODES = sorted(wire.ARRAY_ITEM_SIZES)


@st.composite
def arrays(draw: st.DrawFn) -> array[Any]:
    code = draw(st.sampled_from(TYPECODES))
    size = wire.ARRAY_ITEM_SIZES[code]
    return array(code, draw(st.binary(max_size=64).map(lambda content: content[: len(content) // size * size])))


def bits(values: Any) -> list[tuple[str, bytes]]:
    return [(value.typecode, value.tobytes()) for value in values]


@given(st.lists(arrays(), max_size=6), st.integers(0, 40), st.integers(3, 6))
def test_arrays_of_every_type_round_trip(values: list[Any], raw_frame_bytes: int, frame_limit: int) -> None:
    codec: WireCodec[Arrays] = WireCodec(Arrays, WireLimits(frames=frame_limit), raw_frame_bytes)
    values = [value for value in values if len(value) or raw_frame_bytes]
    frames = codec.encode(Arrays(arrays=tuple(values)))
    assert len(frames) < frame_limit
    assert bits(codec.decode([bytes(frame) for frame in frames]).arrays) == bits(values)


def test_empty_arrays_round_trip_even_without_a_threshold() -> None:
    codec: WireCodec[Arrays] = WireCodec(Arrays, raw_frame_bytes=0)
    frames = codec.encode(Arrays(arrays=(array("i"), array("f", [1.0]))))
    assert codec.decode(frames).arrays == (array("i"), array("f", [1.0]))


def test_a_large_array_is_a_frame_of_its_own_without_a_copy() -> None:
    tokens = array("i", range(100_000))
    frames = WireCodec(Arrays).encode(Arrays(arrays=(tokens,)))
    assert len(frames) == 2
    assert len(frames[0]) < 100
    view = frames[1]
    assert isinstance(view, memoryview)
    tokens[0] = 77
    assert view[0] == 77


def test_bytes_travel_in_the_body() -> None:
    codec: WireCodec[Blob] = WireCodec(Blob)
    blob = codec.decode(codec.encode(Blob(content=b"x" * 200_000, view=memoryview(b"abc"))))
    assert blob.content == b"x" * 200_000
    assert blob.view is not None
    assert bytes(blob.view) == b"abc"


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_decoding_is_total(frames: list[bytes]) -> None:
    for item_type in (messages.EngineOrder, Arrays, Any):
        try:
            WireCodec(item_type).decode(frames)
        except WireError:
            continue


msgpack_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) 
    | st.binary(max_size=5)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=9)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300)
@given(msgpack_values, st.lists(st.binary(max_size=16), max_size=3), st.data())
def test_decoding_is_total_on_wellformed_and_flipped_msgpack(value: Any, raw: list[bytes], data: st.DataObject) -> None:
    body = bytearray(msgspec.msgpack.encode({"arrays": value, "columns": {"a": value}, "type": "Abort", "x": value}))
    for _ in range(data.draw(st.integers(0, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for item_type in (messages.EngineOrder, Arrays, Any):
        try:
            WireCodec(item_type).decode([bytes(body), *raw])
        except WireError:
            continue


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xa2\xff\xfe",  # UnicodeDecodeError, which msgspec does not call a DecodeError
        b"\x91" * 100_000,  # RecursionError
        b"\xdd\xff\xff\xff\xff",  # four billion elements are announced
        b"\xc7\xff",
        msgspec.msgpack.encode(1) + b"\x00",  # trailing bytes
        b"\x81\xd5\x01i\x00\x01",  # an array as a map key: not hashable
    ],
)
def test_broken_bodies_are_wire_errors(body: bytes) -> None:
    with pytest.raises(WireError):
        WireCodec(Any).decode([body])


def extension(kind: int, content: bytes, times: int = 1) -> bytes:
    return msgspec.msgpack.encode({"arrays": [msgspec.msgpack.Ext(kind, content)] * times})


@pytest.mark.parametrize(
    ("body", "raw", "message"),
    [
        (extension(1, b""), [], "array type"),
        (extension(1, b"l" + bytes(8)), [], "array type 'l'"),
        (extension(1, b"u" + bytes(4)), [], "array type 'u'"),
        (extension(1, b"i" + bytes(3)), [], "3 bytes are not an array"),
        (extension(9, b"i" + bytes(4)), [], "extension 9"),
        (extension(2, b"i" + struct.pack("<I", 0)), [], "raw frame 0"),
        (extension(2, b"i" + struct.pack("<I", 1)), [bytes(4), bytes(4)], "raw frame 1"),
        (extension(2, b"i" + struct.pack("<I", 0)), [bytes(5)], "5 bytes are not an array"),
        (extension(2, b"i" + struct.pack("<I", 0)), [bytes(4), bytes(4)], "1 raw frames"),
        (extension(2, b"i"), [bytes(4)], "extension 2"),
        (extension(2, b"i" + struct.pack("<I", 0), times=2), [bytes(4)], "raw frame 0"),
    ],
)
def test_broken_arrays_are_wire_errors(body: bytes, raw: list[bytes], message: str) -> None:
    with pytest.raises(WireError, match=message):
        WireCodec(Arrays).decode([body, *raw])


@pytest.mark.parametrize(
    ("limits", "frames", "message"),
    [
        (WireLimits(frames=3), [b"\x80", b"", b""], "4 frames is over the limit of 3"),
        (WireLimits(frame_bytes=20), [b"\x80", bytes(21)], "21 bytes is over the limit of 20"),
        (WireLimits(body_bytes=20), [bytes(21)], "body of 21 bytes is over the limit of 20"),
        (WireLimits(message_bytes=40), [bytes(13), bytes(12)], "41 bytes is over the limit of 40"),
    ],
)
def test_sizes_are_checked_before_decoding(limits: WireLimits, frames: list[bytes], message: str) -> None:
    codec: WireCodec[Any] = WireCodec(Any, limits)
    codec._decoder = None  # type: ignore[assignment]  # nothing may be decoded
    with pytest.raises(WireError, match=message):
        codec.decode(frames)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (messages.EngineCall(order_id=1, method="resume"), "an item of type EngineCall on a stream of Arrays"),
        (Arrays(columns={"a": "\ud800"}), "surrogates"),
        (Arrays(columns={"a": 2**80}), "cannot be encoded"),
        (Arrays(columns={"a": object()}), "objects of type object do not travel"),
        (Arrays(arrays=(array("l", [1]),)), "arrays of type 'l' do not travel"),
        (Arrays(arrays=(array("b", bytes(1000)),)), "over the limit"),
    ],
)
def test_items_that_cannot_travel_are_refused_when_sent(item: Any, message: str) -> None:
    codec: WireCodec[Arrays] = WireCodec(Arrays, WireLimits(message_bytes=500))
    with pytest.raises(WireError, match=message):
        codec.encode(item)
    assert codec.decode(codec.encode(Arrays())) == Arrays()


def test_header_round_trip_and_strangers() -> None:
    assert wire.parse_header(wire.pack_header(5, 2**64 - 1)) == (wire.WIRE_VERSION, 5, 2**64 - 1)
    for frame in (b"", b"GET / HTTP/1.1\r\n", bytes(16), wire.pack_header(1) + b"\x00"):
        with pytest.raises(WireError, match="not streamrl"):
            wire.parse_header(frame)


def test_type_names_do_not_depend_on_the_order_of_a_union() -> None:
    assert wire.item_type_name(messages.EngineCall | messages.Abort) == "Abort | EngineCall"
    assert wire.item_type_name(messages.SaveCheckpoint) == "SaveCheckpoint"
    assert wire.item_type_name(list[int]) == "list[int]"
