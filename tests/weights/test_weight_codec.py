"""The codec is exact for every bit pattern, takes the smallest form, and refuses what it would not write."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.comm.weights.bit_patterns import as_bits
from streamrl.comm.weights.codec import Codec, decode_patch, encode_patch, encoded_sizes
from streamrl.errors import WeightError

U16, U32 = np.dtype("<u2"), np.dtype("<u4")
HEADER_BYTES = 24


def apply(old: np.ndarray, encoded: bytes) -> np.ndarray:
    """What a receiver of ``old`` holds after the patch."""
    patch = decode_patch(encoded, old.dtype, old.size, "t")
    new = old.copy()
    new[slice(None) if patch.positions is None else patch.positions] = patch.values
    return new


@given(st.data())
def test_round_trip_for_any_change(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([U16, U32]))
    count = data.draw(st.integers(0, 300))
    seed = data.draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    old = random.integers(0, 2 ** (8 * bits.itemsize), count, dtype=np.uint64).astype(bits)
    new = old.copy()
    touched = random.random(count) < data.draw(st.sampled_from([0.0, 0.005, 0.02, 0.3, 0.95, 1.0]))
    new[touched] ^= bits.type(data.draw(st.integers(1, 2**16 - 1)))
    encoded = encode_patch(new, np.flatnonzero(new != old))
    assert np.array_equal(apply(old, encoded), new)
    changed = int((new != old).sum())
    assert len(encoded) == min(encoded_sizes(count, changed, bits.itemsize).values())


@pytest.mark.parametrize("dense", [True, False])
def test_every_bfloat16_pattern_survives(dense: bool) -> None:
    """Among them both zeros, both infinities, every subnormal and every NaN payload."""
    new = np.arange(65536, dtype=U16)
    for shift in (1, 0x7FFF, 0x8000, 0xFFFF):
        old = new ^ U16.type(shift)
        assert np.array_equal(apply(old, encode_patch(new, None if dense else np.flatnonzero(new != old))), new)


def test_float32_nan_payloads_and_signed_zero_survive() -> None:
    new = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000000, 0x00000001], dtype=U32)
    old = np.array([0x7FC00002, 0xFFC12345, 0x7F800002, 0x00000000, 0x80000000, 0x00000001], dtype=U32)
    positions = np.flatnonzero(new != old)
    assert positions.tolist() == [0, 2, 3, 4]
    assert np.array_equal(apply(old, encode_patch(new, positions)), new)


@pytest.mark.parametrize(
    ("count", "changed", "codec"),
    [(10_000, 10, Codec.INDEX), (10_000, 1_000, Codec.BITMASK), (10_000, 9_900, Codec.DENSE), (0, 0, Codec.INDEX)],
)
def test_takes_the_smallest_codec(count: int, changed: int, codec: Codec) -> None:
    encoded = encode_patch(np.arange(count, dtype=U16), np.arange(changed))
    assert encoded[0] == codec


def test_empty_shard_as_anchor() -> None:
    patch = decode_patch(encode_patch(np.zeros(0, U16), None), U16, 0, "t")
    assert patch.positions is None
    assert patch.values.size == 0


def _encoded(codec: Codec) -> bytearray:
    positions = {Codec.INDEX: np.array([3, 500]), Codec.BITMASK: np.arange(0, 1000, 5), Codec.DENSE: None}[codec]
    encoded = bytearray(encode_patch(np.arange(1001, dtype=U16), positions))
    assert encoded[0] == codec
    return encoded


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("wrong", ["short", "long", "codec", "layout", "width", "elements", "changed"])
def test_refuses_a_patch_that_does_not_add_up(codec: Codec, wrong: str) -> None:
    encoded = _encoded(codec)
    match wrong:
        case "short":
            del encoded[-1]
        case "long":
            encoded.append(0)
        case "codec":
            encoded[0] = 9
        case "layout":
            encoded[2] = 7
        case "width":
            encoded[1] = 4
        case "elements":
            struct.pack_into("<Q", encoded, 8, 1002)
        case "changed":
            struct.pack_into("<Q", encoded, 16, 5000)
    with pytest.raises(WeightError, match="patch of 'layer"):
        decode_patch(bytes(encoded), U16, 1001, "layer")


@pytest.mark.parametrize("positions", [(500, 3), (3, 3), (3, 1001)])
def test_refuses_positions_that_do_not_increase_or_leave_the_shard(positions: tuple[int, int]) -> None:
    encoded = _encoded(Codec.INDEX)
    struct.pack_into("<II", encoded, HEADER_BYTES, *positions)
    with pytest.raises(WeightError, match="positions"):
        decode_patch(bytes(encoded), U16, 1001, "layer")


@pytest.mark.parametrize("flips", [{0: 0x02}, {0: 0x01, 125: 0x80}], ids=["one more", "a bit beyond the shard"])
def test_refuses_a_bitmask_that_marks_other_elements(flips: dict[int, int]) -> None:
    encoded = _encoded(Codec.BITMASK)
    for byte, bits in flips.items():
        encoded[HEADER_BYTES + byte] ^= bits
    with pytest.raises(WeightError, match="bitmask"):
        decode_patch(bytes(encoded), U16, 1001, "layer")


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
