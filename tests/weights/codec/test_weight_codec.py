"""The codec is exact for every bit pattern, small, and refuses what it would not write."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.base.errors import WeightError
from streamrl.weights.codec.bits import (
    apply_moves,
    as_bits,
    bit_type,
    exponent_field,
    exponents_of,
    from_ordered,
    move_symbols,
    to_ordered,
)
from streamrl.weights.codec.codec import EncodedPatch, WeightPatch, classes_of, decode_patch, encode_patch

U16, U32 = np.dtype("<u2"), np.dtype("<u4")
DTYPES = ["bfloat16", "float16", "float32"]
HALF_EDGES = [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x03FF, 0x0400, 0x3F80, 0xBC00]
HALF_EDGES += [0x7BFF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0x7F80, 0xFF80, 0x7F81, 0x7FC1, 0x7FFF, 0xFFFF]
SINGLE_EDGES = [0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x3F7FFFFF, 0x7F7FFFFF]
SINGLE_EDGES += [0x7F800000, 0x7F800001, 0x7FC00000, 0x7FC12345, 0x7FFFFFFF]
SINGLE_EDGES += [edge | 0x80000000 for edge in SINGLE_EDGES]


def applied(base: np.ndarray, encoded: bytes, dtype: str = "bfloat16") -> np.ndarray:
    """What a receiver of ``base`` holds after the patch."""
    patch = decode_patch(encoded, dtype, base.size, "t", base)
    new = base.copy()
    new[slice(None) if patch.positions is None else patch.positions] = patch.values
    return new


def encoded_delta(base: np.ndarray, new: np.ndarray, dtype: str) -> EncodedPatch:
    encoded = encode_patch(new, base, dtype)
    assert encoded is not None
    return encoded


def assert_exact(base: np.ndarray, new: np.ndarray, dtype: str) -> None:
    """Both ways of sending ``new`` arrive bit for bit, and the publisher's own view is what changed."""
    delta = encode_patch(new, base, dtype)
    if delta is None:
        assert np.array_equal(base, new)
    else:
        assert not np.array_equal(base, new), "nothing changed, so there is nothing to send"
        assert np.array_equal(applied(base, delta.encoded, dtype), new)
        assert np.array_equal(delta.patch.positions, np.flatnonzero(base != new))
        assert np.array_equal(delta.patch.values, new[base != new])
        listed = decode_patch(delta.encoded, dtype, base.size, "t", base)
        assert listed.positions is None or bool(np.all(np.diff(listed.positions) > 0))
        assert len(delta.encoded) <= new.nbytes
    anchor = encode_patch(new, None, dtype)
    assert anchor is not None
    assert np.array_equal(decode_patch(anchor.encoded, dtype, base.size, "t", None).values, new)
    assert len(anchor.encoded) <= new.nbytes


def normal_bits(count: int, dtype: str, seed: int = 0) -> np.ndarray:
    values = (np.random.default_rng(seed).standard_normal(count) * 0.02).astype(np.float32)
    match dtype:
        case "bfloat16":
            return (values.view(U32) >> 16).astype(U16)
        case "float16":
            return values.astype(np.float16).view(U16)
    return values.view(U32)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_round_trip_for_any_change_and_never_larger_than_dense(data: st.DataObject) -> None:
    """Any density, tensors of a few elements among them."""
    dtype = data.draw(st.sampled_from(DTYPES))
    count = data.draw(st.integers(0, 1500) | st.integers(0, 20))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    base = normal_bits(count, dtype) if data.draw(st.booleans()) else random_bits(random, count, dtype)
    new = base.copy()
    touched = random.random(count) < data.draw(st.sampled_from([0.0, 0.005, 0.02, 0.3, 0.95, 1.0]))
    match data.draw(st.sampled_from(["step", "flip", "anything"])):
        case "step":
            new[touched] += 1
        case "flip":
            new[touched] ^= base.dtype.type(data.draw(st.integers(1, 2**16 - 1)))
        case "anything":
            new[touched] = random_bits(random, int(touched.sum()), dtype)
    assert_exact(base, new, dtype)


def random_bits(random: np.random.Generator, count: int, dtype: str) -> np.ndarray:
    return random.integers(0, 2**32, count, dtype=np.uint64).astype(bit_type(dtype, "t"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_half_pattern_survives_from_and_to_every_edge(dtype: str) -> None:
    """Among them both zeros, both infinities, every subnormal and every NaN payload."""
    every = np.arange(65536, dtype=U16)
    for edge in HALF_EDGES:
        constant = np.full(65536, edge, dtype=U16)
        for base, new in ((every, constant), (constant, every)):
            assert np.array_equal(applied(base, encoded_delta(base, new, dtype).encoded, dtype), new), hex(edge)


def test_every_pair_of_single_precision_edges_survives() -> None:
    edges = np.array(SINGLE_EDGES, dtype=U32)
    base, new = np.repeat(edges, edges.size), np.tile(edges, edges.size)
    assert_exact(base, new, "float32")
    for offset in (1, 0x007FFFFF, 0x7FFFFFFF, 0x80000000):
        assert_exact(base, new + U32.type(offset), "float32")


def test_bits_that_lie_apart_are_read_where_they_lie() -> None:
    """As the upper halves of float32 parameters do."""
    wide = np.arange(3000, dtype=U32) * U32.type(0x00010003)
    halves = wide.view(U16)[1::2]
    base = halves.copy()
    base[::7] ^= 5
    assert np.array_equal(applied(base, encoded_delta(base, halves, "bfloat16").encoded), halves)
    held = wide.view(U16)[1::2]
    assert np.array_equal(applied(held, encoded_delta(held.copy(), base, "bfloat16").encoded), base)


def test_a_patch_keeps_nothing_of_what_it_was_made_from() -> None:
    base = normal_bits(1000, "bfloat16")
    new = base + U16.type(1)
    for of in (base, None):
        encoded = encode_patch(new, of, "bfloat16")
        assert encoded is not None
        assert not np.shares_memory(encoded.patch.values, new)


# ---- refusals --------------------------------------------------------------------------------------

COUNT = 1001


def a_delta() -> tuple[np.ndarray, bytes]:
    base = normal_bits(COUNT, "bfloat16")
    new = base.copy()
    new[::17] += 1
    return base, encoded_delta(base, new, "bfloat16").encoded


def header_of(encoded: bytes) -> list:
    (length,) = struct.unpack_from("<H", encoded)
    return msgspec.msgpack.decode(encoded[2 : 2 + length])


def with_header(encoded: bytes, header: list) -> bytes:
    (length,) = struct.unpack_from("<H", encoded)
    packed = msgspec.msgpack.encode(header)
    return struct.pack("<H", len(packed)) + packed + encoded[2 + length :]


LAYOUT, ELEMENTS, CLASSES = range(3)


def wrong_headers() -> Iterator[tuple[str, int, object]]:
    yield "another layout", LAYOUT, 1
    yield "more elements", ELEMENTS, COUNT + 1
    yield "huge elements", ELEMENTS, 2**63
    yield "no class, so planes", CLASSES, []
    yield "a class that the base has not", CLASSES, [[99, 59, 1, 1]]
    yield "a negative class", CLASSES, [[-1, 59, 1, 1]]
    yield "negative lengths", CLASSES, [[1, 59, -1, 3]]
    yield "no changes", CLASSES, [[1, 0, 1, 1]]
    yield "negative changes", CLASSES, [[1, -1, 1, 1]]
    yield "more changes than its class has members", CLASSES, [[1, COUNT, 1, 1]]
    yield "more than 64 bits hold", CLASSES, [[1, 2**64 - 1, 2**64 - 1, 2**64 - 1]]
    yield "more bytes than there are", CLASSES, [[1, 59, 2**40, 2**40]]


@pytest.mark.parametrize(("field", "value"), [pytest.param(*case[1:], id=case[0]) for case in wrong_headers()])
def test_refuses_a_header_that_does_not_add_up(field: int, value: object) -> None:
    base, encoded = a_delta()
    header = header_of(encoded)
    assert sum(changes for _, changes, _, _ in header[CLASSES]) == 59
    header[field] = value
    with pytest.raises(WeightError, match="patch of 'layer"):
        decode_patch(with_header(encoded, header), "bfloat16", COUNT, "layer", base)


def test_repeated_or_disordered_classes_are_refused() -> None:
    """A class that comes twice, out of order or with more changes is refused."""
    base, encoded = a_delta()
    first, second, *others = header_of(encoded)[CLASSES]
    more = [first[0], first[1] + 1, *first[2:]]
    negative = [*first[:2], first[2] + second[2] + 1, first[3] - second[2] - 1]
    for classes in (
        [first, first, *others],
        [second, first, *others],
        [more, second, *others],
        [negative, second, *others],
    ):
        with pytest.raises(WeightError, match="patch of 'layer"):
            decode_patch(with_header(encoded, [*header_of(encoded)[:2], classes]), "bfloat16", COUNT, "layer", base)


def test_refuses_a_header_of_another_writer() -> None:
    """An integer in more bytes than it needs decodes to the same number, and would give a patch two identities."""
    base, encoded = a_delta()
    (length,) = struct.unpack_from("<H", encoded)
    assert encoded[3] == 4  # the layout, as a one-byte integer
    longer = struct.pack("<H", length + 1) + encoded[2:3] + b"\xcc\x04" + encoded[4:]
    with pytest.raises(WeightError, match="another writer"):
        decode_patch(longer, "bfloat16", COUNT, "layer", base)


@pytest.mark.parametrize("anchor", [False, True])
def test_refuses_every_truncation_and_anything_appended(anchor: bool) -> None:
    base, encoded = a_delta()
    if anchor:
        complete = encode_patch(base, None, "bfloat16")
        assert complete is not None
        encoded = complete.encoded
    for length in range(len(encoded)):
        with pytest.raises(WeightError, match="patch of 't"):
            decode_patch(encoded[:length], "bfloat16", COUNT, "t", base)
    with pytest.raises(WeightError, match="patch of 't"):
        decode_patch(encoded + b"\0", "bfloat16", COUNT, "t", base)


@pytest.mark.parametrize("changed", [1, 60, 600])
def test_a_flipped_bit_is_refused_or_another_valid_patch(changed: int) -> None:
    """Any flipped bit is refused, or decodes to another patch of this shard. What is left to the digests: another
    patch. Never a crash, a position outside, or an unordered one."""
    base = normal_bits(COUNT, "bfloat16")
    new = base.copy()
    new[np.random.default_rng(1).choice(COUNT, changed, replace=False)] += 1
    encoded = encoded_delta(base, new, "bfloat16").encoded
    refused = 0
    for bit in range(8 * len(encoded)):
        flipped = bytearray(encoded)
        flipped[bit // 8] ^= 1 << (bit % 8)
        try:
            patch = decode_patch(bytes(flipped), "bfloat16", COUNT, "t", base)
        except WeightError:
            refused += 1
        else:
            assert_fits(patch, base)
    assert refused > 0


def assert_fits(patch: WeightPatch, base: np.ndarray) -> None:
    if patch.positions is None:
        assert patch.values.size == base.size
        return
    assert patch.positions.size == patch.values.size
    assert bool(np.all(np.diff(patch.positions) > 0))
    assert patch.positions[0] >= 0
    assert patch.positions[-1] < base.size
    assert bool(np.all(patch.values != base[patch.positions]))


def test_a_delta_on_another_base_is_refused() -> None:
    """A delta on another base is refused where its changes have no place."""
    base = normal_bits(20_000, "bfloat16")
    new = base.copy()
    new[-1] += 1
    encoded = encoded_delta(base, new, "bfloat16").encoded
    assert np.array_equal(applied(base, encoded), new)
    other = base.copy()
    of_its_exponent = np.flatnonzero(exponents_of(base, "bfloat16") == exponents_of(base[-1:], "bfloat16"))
    other[of_its_exponent[:1]] = 0  # one member less before it
    with pytest.raises(WeightError, match="another base"):
        decode_patch(encoded, "bfloat16", base.size, "layer", other)


def test_a_delta_needs_its_base() -> None:
    base, encoded = a_delta()
    with pytest.raises(WeightError, match=r"'layer.*nothing is held"):
        decode_patch(encoded, "bfloat16", COUNT, "layer", None)
    with pytest.raises(WeightError, match=r"its base has 1000 of uint16"):
        decode_patch(encoded, "bfloat16", COUNT, "layer", base[:-1])


def test_refuses_an_element_that_does_not_change() -> None:
    base = np.zeros(100, dtype=U16)
    new = base.copy()
    new[3] = 0x8000  # one step down, symbol 0
    encoded = encoded_delta(base, new, "bfloat16").encoded
    header = header_of(encoded)
    ((kind, changes, gap_bytes, _),) = header[CLASSES]
    body = encoded[2 + struct.unpack_from("<H", encoded)[0] :]
    same = bytes((15,)) + b"\x02" + b"\xff\x7f"  # Rice with 15 low bits: quotient 1, remainder 0x7fff
    packed = msgspec.msgpack.encode([*header[:2], [[kind, changes, gap_bytes, len(same)]]])
    forged = struct.pack("<H", len(packed)) + packed + body[:gap_bytes] + same
    with pytest.raises(WeightError, match="does not change"):
        decode_patch(forged, "bfloat16", 100, "layer", base)


@pytest.mark.parametrize("dtype", DTYPES)
def test_base_exponents_are_classes_and_rare_ones_share_one(dtype: str) -> None:
    """Every exponent of the base is a class, and rare ones share one. So that what changes at one rate is counted by
    itself; nothing about it travels."""
    lowest, exponents = exponent_field(dtype)
    common = np.repeat(np.arange(exponents), 64)
    base = (common << lowest).astype(bit_type(dtype, "t"))
    assert classes_of(base, dtype).sizes.tolist() == [0, *[64] * exponents]
    rare = classes_of(base[:-1], dtype)
    assert rare.sizes.tolist() == [63, *[64] * (exponents - 1)]
    assert (int(rare.class_at[-1]), int(rare.class_at[0])) == (0, 1)
    new = base + base.dtype.type(1)
    assert_exact(base, new, dtype)


@pytest.mark.parametrize("edge", [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC1, 0x7FFF, 0xFFFF])
def test_steps_are_a_bijection_of_all_patterns(edge: int) -> None:
    every = np.arange(65536, dtype=U16)
    base = np.full(65536, edge, dtype=U16)
    symbols = move_symbols(base, every)
    assert np.unique(symbols).size == 65536
    assert symbols[edge] == 65535  # no change, which no patch may say
    assert np.array_equal(apply_moves(base, symbols), every)


def test_order_is_that_of_the_numbers() -> None:
    """The order of bit patterns is that of the numbers, and neighbours are one step apart."""
    every = np.arange(65536, dtype=U16)
    assert np.array_equal(from_ordered(to_ordered(every)), every)
    numbers = (every.astype(np.uint32) << 16).view(np.float32)
    finite = every[np.isfinite(numbers)]
    by_order = finite[np.argsort(to_ordered(finite))]
    assert bool(np.all(np.diff((by_order.astype(np.uint32) << 16).view(np.float32)) >= 0))
    assert set(move_symbols(by_order[:-1], by_order[1:]).tolist()) == {1}
    assert set(move_symbols(by_order[1:], by_order[:-1]).tolist()) == {0}


def test_bits_must_have_the_width_and_size_of_the_shard() -> None:
    assert as_bits(np.array([-1, 2], np.int16), "bfloat16", 2, "t").tolist() == [65535, 2]
    with pytest.raises(WeightError, match="give its bit patterns as uint16"):
        as_bits(np.zeros(2, np.float16), "float16", 2, "t")
    with pytest.raises(WeightError, match="give its bit patterns as uint32"):
        as_bits(np.zeros(2, np.uint16), "float32", 2, "t")
    with pytest.raises(WeightError, match="3 elements; this shard holds 2"):
        as_bits(np.zeros(3, np.uint16), "bfloat16", 2, "t")
    with pytest.raises(WeightError, match="'float8'"):
        as_bits(np.zeros(2, np.uint8), "float8", 2, "t")


def test_what_is_as_long_as_dense_is_dense() -> None:
    random = np.random.default_rng(0)
    for dtype in DTYPES:
        for count in (1, 2, 3, 40):
            base, new = random_bits(random, count, dtype), random_bits(random, count, dtype)
            assert encoded_delta(base, new, dtype).encoded == new.tobytes()
            anchor = encode_patch(new, None, dtype)
            assert anchor is not None
            assert anchor.encoded == new.tobytes()
