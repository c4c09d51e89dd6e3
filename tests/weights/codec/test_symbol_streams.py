"""Streams are exact in both codes, the shorter one is taken, and nothing else than a stream is read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.base.errors import WeightError
from streamrl.weights.codec.symbols import decode_symbols, encode_symbols

U16, U32 = np.dtype("<u2"), np.dtype("<u4")
PCODEC = 255


def decoded(encoded: bytes, like: np.ndarray) -> np.ndarray:
    return decode_symbols(memoryview(encoded), like.dtype, like.size, "t")


def geometric(count: int, dtype: np.dtype, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).geometric(0.02, count) - 1).astype(dtype)


@settings(deadline=None)
@given(st.data())
def test_any_symbols_survive(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([U16, U32]))
    size = data.draw(st.sampled_from([0, 1, 2, 50, 4095, 4096, 4097, 9000]))
    top = data.draw(st.sampled_from([1, 2, 7, 300, 1 << (8 * dtype.itemsize)]))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    symbols = random.integers(0, top, size, dtype=np.uint64).astype(dtype)
    assert np.array_equal(decoded(encode_symbols(symbols), symbols), symbols)


@pytest.mark.parametrize(("count", "pcodec"), [(30, False), (10_000, True)])
def test_short_streams_take_rice_and_long_ones_pcodec(count: int, pcodec: bool) -> None:
    assert (encode_symbols(geometric(count, U32))[0] == PCODEC) == pcodec


def test_coin_flips_take_a_bit_each() -> None:
    flips = np.random.default_rng(0).integers(0, 2, 4000, dtype=U16)
    encoded = encode_symbols(flips)
    assert len(encoded) == 501
    for wrong in (encoded + b"\0", encoded[:-1], encoded[:1]):
        with pytest.raises(WeightError, match="4000 symbols of 1 bits"):
            decoded(wrong, flips)
    with pytest.raises(WeightError, match="bits beyond its end"):
        decoded(bytes((33, 0b1000)), np.empty(3, dtype=U16))


@pytest.mark.parametrize("count", [30, 10_000])
def test_refuses_a_byte_more_or_less(count: int) -> None:
    symbols = geometric(count, U32)
    encoded = encode_symbols(symbols)
    for wrong in (encoded + b"\0", encoded[:-1], encoded[:1], b""):
        with pytest.raises(WeightError, match="'t' has a stream that cannot be decoded"):
            decoded(wrong, symbols)


@pytest.mark.parametrize("count", [30, 10_000])
@pytest.mark.parametrize("claimed", [0, 1, 29, 31, 9_999, 10_001, 2_000_000])
def test_refuses_another_number_of_symbols(count: int, claimed: int) -> None:
    encoded = encode_symbols(geometric(count, U32))
    with pytest.raises(WeightError, match="cannot be decoded"):
        decoded(encoded, np.empty(claimed, dtype=U32))


def test_misfitting_rice_symbols_are_refused() -> None:
    """Rice symbols that do not fit, and bits beyond the end, are refused."""
    one = np.empty(1, dtype=U16)
    assert decoded(bytes((4, 0b1, 0x0F)), one).tolist() == [15]
    with pytest.raises(WeightError, match="bits beyond its end"):
        decoded(bytes((4, 0b1, 0x1F)), one)
    with pytest.raises(WeightError, match="symbol 131072 for uint16"):
        decoded(bytes((17, 0b10, 0, 0, 0)), one)
    with pytest.raises(WeightError, match="code 49 for 1"):
        decoded(bytes((49, 0b1, 0, 0)), one)
    with pytest.raises(WeightError, match="code 0 for 5000"):
        decoded(b"\0" + b"\xff" * 625, np.empty(5000, dtype=U16))


@pytest.mark.parametrize("count", [30, 10_000])
def test_damaged_streams_are_refused_or_read_as_so_many_symbols(count: int) -> None:
    """Never a crash: what comes back is what a digest would have caught."""
    symbols, random = geometric(count, U32), np.random.default_rng(0)
    encoded = encode_symbols(symbols)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(encoded)
        for _ in range(random.integers(1, 4)):
            damaged[random.integers(min(len(damaged), 200))] ^= 1 << random.integers(8)
        try:
            assert decoded(bytes(damaged), symbols).size == count
        except WeightError:
            refused += 1
    assert refused > 100
