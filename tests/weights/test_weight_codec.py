"""The codec is exact for every bit pattern, small, and refuses what it would not write."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.base.errors import WeightError
from streamrl.weights import compiled_paths
from streamrl.weights.bit_patterns import as_bits, bit_type
from streamrl.weights.codec import single_exponents
from streamrl.weights.codec.codec import Codec, EncodedPatch, WeightPatch, decode_patch, encode_patch

U16, U32 = np.dtype("<u2"), np.dtype("<u4")
DTYPES = ["bfloat16", "float16", "float32"]
HALF_EDGES = [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x03FF, 0x0400, 0x3F80, 0xBC00]
HALF_EDGES += [0x7BFF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0x7F80, 0xFF80, 0x7F81, 0x7FC1, 0x7FFF, 0xFFFF]
SINGLE_EDGES = [0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x3F7FFFFF, 0x7F7FFFFF]
SINGLE_EDGES += [0x7F800000, 0x7F800001, 0x7FC00000, 0x7FC12345, 0x7FFFFFFF]
SINGLE_EDGES += [edge | 0x80000000 for edge in SINGLE_EDGES]


@pytest.fixture(autouse=True)
def plain_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The codec with a header and the split in numpy, whatever the size and whatever is loaded."""
    take_form("plain", monkeypatch)


def take_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from_elements = 1 << 40 if form.startswith("plain") else 1
    monkeypatch.setattr(compiled_paths, "_FROM_ELEMENTS", from_elements)
    monkeypatch.setattr(compiled_paths, "_FROM_ELEMENTS_WHEN_LOADED", from_elements)
    for limit in ("MANY_CHANGES", "MANY_CHANGES_PLAIN"):
        monkeypatch.setattr(single_exponents, limit, 1 << 40 if form.endswith("single") else -1)


@pytest.fixture(params=["plain", "compiled"])
def each_split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The codec with a header and the split in numpy, then with the compiled one."""
    take_form(request.param, monkeypatch)


@pytest.fixture(params=["plain", "compiled", "single"])
def each_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and single exponents in adaptive code."""
    take_form(request.param, monkeypatch)


def applied(base: np.ndarray, encoded: bytes) -> np.ndarray:
    """What a receiver of ``base`` holds after the patch."""
    patch = decode_patch(encoded, base.dtype, base.size, "t", base)
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
        assert np.array_equal(applied(base, delta.encoded), new)
        assert np.array_equal(delta.patch.positions, np.flatnonzero(base != new))
        assert np.array_equal(delta.patch.values, new[base != new])
        listed = decode_patch(delta.encoded, base.dtype, base.size, "t", base)
        assert listed.values.size == delta.listed_elements
        assert listed.positions is None or bool(np.all(np.diff(listed.positions) > 0))
        assert len(delta.encoded) <= new.nbytes
    anchor = encode_patch(new, None, dtype)
    assert anchor is not None
    assert np.array_equal(decode_patch(anchor.encoded, base.dtype, base.size, "t", None).values, new)
    assert len(anchor.encoded) <= new.nbytes


def normal_bits(count: int, dtype: str, seed: int = 0) -> np.ndarray:
    values = (np.random.default_rng(seed).standard_normal(count) * 0.02).astype(np.float32)
    match dtype:
        case "bfloat16":
            return (values.view(U32) >> 16).astype(U16)
        case "float16":
            return values.astype(np.float16).view(U16)
    return values.view(U32)


@pytest.mark.timeout(240)  # the first to compile
@pytest.mark.parametrize("form", ["plain", "compiled", "single", "plain single"])
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_round_trip_for_any_change_and_never_larger_than_dense(form: str, data: st.DataObject) -> None:
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
    with pytest.MonkeyPatch.context() as patched:
        take_form(form, patched)
        assert_exact(base, new, dtype)


def random_bits(random: np.random.Generator, count: int, dtype: str) -> np.ndarray:
    return random.integers(0, 2**32, count, dtype=np.uint64).astype(bit_type(dtype, "t"))


@pytest.mark.timeout(240)  # the first to compile
@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_half_pattern_survives_from_and_to_every_edge(dtype: str) -> None:
    """Among them both zeros, both infinities, every subnormal and every NaN payload."""
    every = np.arange(65536, dtype=U16)
    for edge in HALF_EDGES:
        constant = np.full(65536, edge, dtype=U16)
        for base, new in ((every, constant), (constant, every)):
            assert np.array_equal(applied(base, encoded_delta(base, new, dtype).encoded), new), hex(edge)


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("flipped", [0x0001, 0x0080, 0x7FFF, 0x8000, 0xFFFF])
def test_every_half_pattern_survives_as_base_of_every_flip(dtype: str, flipped: int) -> None:
    base = np.arange(65536, dtype=U16)
    assert_exact(base, base ^ U16.type(flipped), dtype)


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("each_form")
def test_every_pair_of_single_precision_edges_survives() -> None:
    edges = np.array(SINGLE_EDGES, dtype=U32)
    base, new = np.repeat(edges, edges.size), np.tile(edges, edges.size)
    assert_exact(base, new, "float32")
    for offset in (1, 0x007FFFFF, 0x7FFFFFFF, 0x80000000):
        assert_exact(base, new + U32.type(offset), "float32")


def test_a_zero_that_changes_its_sign_is_a_change() -> None:
    base = np.tile(np.array([0x0000, 0x8000], dtype=U16), 100)
    new = base.copy()
    new[0] = 0x8000
    patch = decode_patch(encoded_delta(base, new, "bfloat16").encoded, U16, 200, "t", base)
    assert patch.positions is not None
    assert (patch.positions.tolist(), patch.values.tolist()) == ([0], [0x8000])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_changed_is_nothing_to_send(dtype: str) -> None:
    for count in (0, 1, 5000):
        bits = normal_bits(count, dtype)
        assert encode_patch(bits.copy(), bits, dtype) is None


@pytest.mark.usefixtures("each_form")
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


LAYOUT, CODEC, WIDTH, ELEMENTS, CHANGED, THRESHOLDS, STREAMS = range(7)


def wrong_headers() -> Iterator[tuple[str, int, object]]:
    yield "another layout", LAYOUT, 1
    yield "an unknown codec", CODEC, 9
    yield "planes", CODEC, 2
    yield "another width", WIDTH, 4
    yield "more elements", ELEMENTS, COUNT + 1
    yield "huge elements", ELEMENTS, 2**63
    yield "more changes than elements", CHANGED, COUNT + 1
    yield "negative changes", CHANGED, -1
    yield "other changes than its classes", CHANGED, 58
    yield "one class too many", THRESHOLDS, [0x3C00]
    yield "a threshold within an exponent", THRESHOLDS, [0x3C01]
    yield "a threshold of zero", THRESHOLDS, [0]
    yield "a threshold beyond all", THRESHOLDS, [0x8000]
    yield "negative lengths", STREAMS, [[59, -1, 2]]
    yield "more bytes than there are", STREAMS, [[59, 2**40, 2**40]]
    yield "no class", STREAMS, []


@pytest.mark.parametrize(("field", "value"), [pytest.param(*case[1:], id=case[0]) for case in wrong_headers()])
def test_refuses_a_header_that_does_not_add_up(field: int, value: object) -> None:
    base, encoded = a_delta()
    header = header_of(encoded)
    assert len(header[STREAMS]) == 1
    assert header[CHANGED] == 59
    header[field] = value
    with pytest.raises(WeightError, match="patch of 'layer"):
        decode_patch(with_header(encoded, header), U16, COUNT, "layer", base)


def test_refuses_streams_of_negative_length_that_add_up() -> None:
    base, encoded = a_delta()
    header = header_of(encoded)
    ((changes, gap_bytes, symbol_bytes),) = header[STREAMS]
    header[STREAMS] = [[changes, gap_bytes + symbol_bytes + 1, -1]]
    with pytest.raises(WeightError, match="its classes add up to"):
        decode_patch(with_header(encoded, header), U16, COUNT, "layer", base)
    header[STREAMS], header[THRESHOLDS] = [[changes + 1, gap_bytes, symbol_bytes], [-1, 0, 0]], [0x3C00]
    with pytest.raises(WeightError, match="its classes add up to"):
        decode_patch(with_header(encoded, header), U16, COUNT, "layer", base)


@pytest.mark.parametrize("threshold", [-128, 0, 0x3C01, 0x3C7F, 0x8000, 0x13C00, 2**32, 2**64 - 128])
def test_refuses_thresholds_that_are_no_exponents(threshold: int) -> None:
    base, encoded = a_delta()
    header = header_of(encoded)
    header[STREAMS].append([0, 0, 0])
    header[THRESHOLDS] = [threshold]
    with pytest.raises(WeightError, match="2 classes with thresholds"):
        decode_patch(with_header(encoded, header), U16, COUNT, "layer", base)


def test_refuses_classes_that_do_not_rise() -> None:
    base = normal_bits(200_000, "bfloat16")
    new = base.copy()
    rare = np.flatnonzero((base & 0x7FFF) < 0x3B00)[::3]
    new[rare] += 1
    encoded = encoded_delta(base, new, "bfloat16").encoded
    header = header_of(encoded)
    assert len(header[THRESHOLDS]) >= 1
    header[THRESHOLDS] = [*header[THRESHOLDS][:-1], 0]
    with pytest.raises(WeightError, match="classes"):
        decode_patch(with_header(encoded, header), U16, base.size, "layer", base)


def test_refuses_a_header_of_another_writer() -> None:
    """An integer in more bytes than it needs decodes to the same number, and would give a patch two identities."""
    base, encoded = a_delta()
    (length,) = struct.unpack_from("<H", encoded)
    assert encoded[3] == 3  # the layout, as a one-byte integer
    longer = struct.pack("<H", length + 1) + encoded[2:3] + b"\xcc\x03" + encoded[4:]
    with pytest.raises(WeightError, match="another writer"):
        decode_patch(longer, U16, COUNT, "layer", base)


@pytest.mark.parametrize("anchor", [False, True])
def test_refuses_every_truncation_and_anything_appended(anchor: bool) -> None:
    base, encoded = a_delta()
    if anchor:
        complete = encode_patch(base, None, "bfloat16")
        assert complete is not None
        encoded = complete.encoded
    for length in range(len(encoded)):
        with pytest.raises(WeightError, match="patch of 't"):
            decode_patch(encoded[:length], U16, COUNT, "t", base)
    with pytest.raises(WeightError, match="patch of 't"):
        decode_patch(encoded + b"\0", U16, COUNT, "t", base)


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("changed", [1, 60, 600])
def test_any_flipped_bit_is_refused_or_decodes_to_a_patch_of_this_shard(changed: int) -> None:
    """What is left to the digests: another patch. Never a crash, a position outside, or an unordered one."""
    base = normal_bits(COUNT, "bfloat16")
    new = base.copy()
    new[np.random.default_rng(1).choice(COUNT, changed, replace=False)] += 1
    encoded = encoded_delta(base, new, "bfloat16").encoded
    refused = 0
    for bit in range(8 * len(encoded)):
        flipped = bytearray(encoded)
        flipped[bit // 8] ^= 1 << (bit % 8)
        try:
            patch = decode_patch(bytes(flipped), U16, COUNT, "t", base)
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


@pytest.mark.usefixtures("each_split")
def test_refuses_a_delta_on_another_base_where_its_changes_have_no_place() -> None:
    base = normal_bits(20_000, "bfloat16")
    new = base.copy()
    new[-1] += 1
    encoded = encoded_delta(base, new, "bfloat16").encoded
    assert len(header_of(encoded)[STREAMS]) == 1
    header = header_of(encoded)
    header[THRESHOLDS], header[STREAMS] = [0x7F80], [*header[STREAMS], [0, 0, 0]]
    moved = with_header(encoded, header)
    assert np.array_equal(applied(base, moved), new)
    other = base.copy()
    other[:10] = 0x7FFF
    with pytest.raises(WeightError, match="another base"):
        decode_patch(moved, U16, base.size, "layer", other)


def test_a_delta_needs_its_base() -> None:
    base, encoded = a_delta()
    with pytest.raises(WeightError, match=r"'layer.*nothing is held"):
        decode_patch(encoded, U16, COUNT, "layer", None)
    with pytest.raises(WeightError, match=r"its base has 1000 of uint16"):
        decode_patch(encoded, U16, COUNT, "layer", base[:-1])


def test_refuses_an_element_that_does_not_change() -> None:
    base = np.zeros(100, dtype=U16)
    new = np.zeros(100, dtype=U16)
    new[3] = 0x8000  # one step down, symbol 0
    encoded = encoded_delta(base, new, "bfloat16").encoded
    header = header_of(encoded)
    (changes, gap_bytes, _) = header[STREAMS][0]
    body = encoded[2 + struct.unpack_from("<H", encoded)[0] :]
    same = bytes((15,)) + b"\x02" + b"\xff\x7f"  # Rice with 15 low bits: quotient 1, remainder 0x7fff
    header[STREAMS] = [[changes, gap_bytes, len(same)]]
    packed = msgspec.msgpack.encode(header)
    forged = struct.pack("<H", len(packed)) + packed + body[:gap_bytes] + same
    with pytest.raises(WeightError, match="does not change"):
        decode_patch(forged, U16, 100, "layer", base)


def test_a_bomb_in_the_exponents_is_refused_before_it_unfolds() -> None:
    bits = np.zeros(COUNT, dtype=U16)
    anchor = encode_patch(bits, None, "bfloat16")
    assert anchor is not None
    assert header_of(anchor.encoded)[CODEC] == Codec.PLANES
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    assert len(bomb) < 1 << 15
    length = 2 + struct.unpack_from("<H", anchor.encoded)[0]
    forged = anchor.encoded[:length] + bomb + bytes(COUNT)
    with pytest.raises(WeightError, match="claims 268435456 exponents for 1001"):
        decode_patch(forged, U16, COUNT, "layer", None)


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


# ---- single exponents ------------------------------------------------------------------------------


def a_single_delta(monkeypatch: pytest.MonkeyPatch, form: str = "single") -> tuple[np.ndarray, bytes]:
    take_form(form, monkeypatch)
    base, encoded = a_delta()
    assert struct.unpack_from("<H", encoded)[0] >= 1 << 15
    return base, encoded


def test_single_exponents_need_their_base(monkeypatch: pytest.MonkeyPatch) -> None:
    base, encoded = a_single_delta(monkeypatch)
    with pytest.raises(WeightError, match=r"'layer.*nothing is held"):
        decode_patch(encoded, U16, COUNT, "layer", None)
    with pytest.raises(WeightError, match=r"its base has 1000 of uint16"):
        decode_patch(encoded, U16, COUNT, "layer", base[:-1])


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        (0x0000, "no lowest threshold"),
        (0x00FF, "a threshold and none"),
        (0x0FF8, "thresholds beyond the last exponent"),
        (0x1F90, "the same, eight apart"),
        (0x1170, "one threshold, eight apart"),
        (0x2370, "a bit that means nothing"),
    ],
)
def test_refuses_classes_that_cannot_be(monkeypatch: pytest.MonkeyPatch, kinds: int, why: str) -> None:
    base, encoded = a_single_delta(monkeypatch)
    forged = struct.pack("<H", 0x8000 | (kinds if kinds else 0x0100)) + encoded[2:]
    with pytest.raises(WeightError, match="classes that cannot be"):
        pytest.fail(f"{why}: {decode_patch(forged, U16, COUNT, 'layer', base)}")


@pytest.mark.parametrize("form", ["single", "plain single"])
def test_refuses_more_or_fewer_bytes_of_adaptive_code_or_reads_another_patch(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arithmetic code has no end of its own: what it reads fits, and the digest and the state hash tell."""
    base, encoded = a_single_delta(monkeypatch, form)
    for appended in (b"\0", b"\1", bytes(50)):
        with pytest.raises(WeightError, match="does not end where its changes do"):
            decode_patch(encoded + appended, U16, COUNT, "layer", base)
    for length in range(len(encoded)):
        try:
            patch = decode_patch(encoded[:length], U16, COUNT, "t", base)
        except WeightError:
            continue
        assert_fits(patch, base)


def test_what_is_as_long_as_dense_is_dense() -> None:
    random = np.random.default_rng(0)
    for dtype in DTYPES:
        for count in (1, 2, 3, 40):
            base, new = random_bits(random, count, dtype), random_bits(random, count, dtype)
            assert encoded_delta(base, new, dtype).encoded == new.tobytes()
            anchor = encode_patch(new, None, dtype)
            assert anchor is not None
            assert anchor.encoded == new.tobytes()
