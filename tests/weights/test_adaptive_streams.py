"""Adaptive code gives back any streams, takes next to their entropy, and reads nothing that leaves a class."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.base.errors import WeightError
from streamrl.weights.codec import adaptive_streams, bit_masks, plain_streams
from streamrl.weights.codec.adaptive_streams import decode_streams, encode_streams
from streamrl.weights.codec.class_split import ClassStreams

pytestmark = pytest.mark.timeout(240)  # the first compiles
U16, U32 = np.dtype("<u2"), np.dtype("<u4")
NO_LIMIT = 1 << 20


def streams_of(
    random: np.random.Generator, sizes: np.ndarray, densities: list[float], top: int, dtype: np.dtype
) -> list:
    streams = []
    for size, density in zip(sizes.tolist(), densities, strict=True):
        ranks = np.flatnonzero(random.random(size) < density)
        gaps = (np.diff(ranks, prepend=-1) - 1).astype(np.uint32)
        symbols = random.integers(0, top, ranks.size, dtype=np.uint64).astype(dtype)
        streams.append(ClassStreams(gaps, symbols))
    return streams


@settings(deadline=None)
@given(st.data())
def test_any_streams_survive(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([U16, U32]))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    sizes = np.array(data.draw(st.lists(st.sampled_from([0, 1, 2, 50, 700]), min_size=1, max_size=16)), dtype=np.int64)
    densities = [data.draw(st.sampled_from([0.0, 0.001, 0.02, 0.5, 0.99, 1.0])) for _ in sizes]
    top = data.draw(st.sampled_from([1, 2, 9, 300, (1 << (8 * dtype.itemsize)) - 1]))
    streams = streams_of(random, sizes, densities, top, dtype)
    encoded = encode_streams(streams, sizes, NO_LIMIT)
    assert encoded is not None
    assert plain_streams.encode_streams(streams, sizes, NO_LIMIT) == encoded
    if not sum(stream.gaps.size for stream in streams):
        with pytest.raises(WeightError, match="lists no change"):
            decode_streams(memoryview(encoded), dtype, sizes, "t")
        return
    for form in (adaptive_streams, plain_streams):
        for stream, decoded in zip(streams, form.decode_streams(memoryview(encoded), dtype, sizes, "t"), strict=True):
            assert np.array_equal(stream.gaps, decoded.gaps)
            assert np.array_equal(stream.symbols, decoded.symbols)
            assert (stream.gaps.dtype, stream.symbols.dtype) == (decoded.gaps.dtype, decoded.symbols.dtype)
        if len(encoded):
            assert form.encode_streams(streams, sizes, len(encoded)) is None
        assert form.encode_streams(streams, sizes, len(encoded) + 1) == encoded


def test_a_gap_of_millions_after_many_of_none_needs_no_more_room_than_is_given() -> None:
    gaps = np.zeros(2000, dtype=np.uint32)
    gaps[1000] = 3_000_000
    streams, sizes = [ClassStreams(gaps, np.zeros(2000, dtype=U16))], np.array([3_002_000], dtype=np.int64)
    encoded = encode_streams(streams, sizes, NO_LIMIT)
    assert encoded is not None
    (decoded,) = decode_streams(memoryview(encoded), U16, sizes, "t")
    assert np.array_equal(decoded.gaps, gaps)
    for limit in (0, 1, 2, 50):
        assert encode_streams(streams, sizes, limit) is None


@pytest.mark.parametrize("elements", [2_000, 60_000])
def test_a_few_dozen_changes_cost_little_more_than_their_entropy(elements: int) -> None:
    """Rates that halve from exponent to exponent, as those of an optimizer step do, and one step up or down."""
    random = np.random.default_rng(1)
    sizes = np.full(10, elements // 10, dtype=np.int64)
    densities = [0.1 * 0.5**kind for kind in range(10)]
    streams = streams_of(random, sizes, densities, 2, U16)
    changed = sum(stream.gaps.size for stream in streams)
    bits = changed + sum(
        -size * (p * np.log2(p) + (1 - p) * np.log2(1 - p)) for size, p in zip(sizes, densities, strict=True)
    )
    encoded = encode_streams(streams, sizes, NO_LIMIT)
    assert encoded is not None
    assert len(encoded) <= 1.03 * bits / 8 + 6


@pytest.mark.parametrize("seed", range(3))
def test_damaged_streams_are_refused_or_read_as_changes_of_these_classes(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = np.array([0, 30, 700, 5000], dtype=np.int64)
    encoded = encode_streams(streams_of(random, sizes, [0, 0.9, 0.1, 0.01], 20, U16), sizes, NO_LIMIT)
    assert encoded is not None
    refused = 0
    for _ in range(300):
        damaged = bytearray(encoded)
        for _ in range(random.integers(1, 4)):
            damaged[random.integers(len(damaged))] ^= 1 << random.integers(8)
        try:
            streams = decode_streams(memoryview(damaged), U16, sizes, "t")
        except WeightError as error:
            refused += 1
            with pytest.raises(WeightError, match=f"^{re.escape(str(error))}$"):
                plain_streams.decode_streams(memoryview(damaged), U16, sizes, "t")
            continue
        plain = plain_streams.decode_streams(memoryview(damaged), U16, sizes, "t")
        assert [s.gaps.tolist() + s.symbols.tolist() for s in plain] == [
            s.gaps.tolist() + s.symbols.tolist() for s in streams
        ]
        for stream, size in zip(streams, sizes.tolist(), strict=True):
            assert int(stream.gaps.sum(dtype=np.int64)) + stream.gaps.size <= size
            assert not np.any(stream.symbols == 0xFFFF)
    assert refused > 20


@settings(deadline=None)
@given(st.integers(1, 2**64 - 1))
def test_both_ways_to_find_a_set_bit_agree(word: int) -> None:
    places = [place for place in range(64) if word >> place & 1]
    for rank, place in enumerate(places):
        assert bit_masks._place_by_steps(np.uint64(word), rank) == place
        assert bit_masks.place_of(np.uint64(word), rank) == place
