"""The compiled single pass does what its plain form says, and both are the inverse of their joins."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.base.errors import WeightError
from streamrl.weights.bit_patterns import bit_type, mantissa_bits
from streamrl.weights.codec import class_split, compiled_split
from streamrl.weights.codec.class_split import ClassStreams
from streamrl.weights.codec.exponent_classes import MAXIMUM_CLASSES, choose_thresholds
from streamrl.weights.ordered_bits import apply_steps, from_ordered, step_symbols, to_ordered

DTYPES = ["bfloat16", "float16", "float32"]
U16 = np.dtype("<u2")


@pytest.mark.timeout(240)  # the first to compile
@settings(deadline=None)
@given(st.data())
def test_the_compiled_pass_equals_the_plain_form(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    count = data.draw(st.sampled_from([0, 1, 7, 255, 256, 257, 511, 512, 513, 2000]))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    bits = bit_type(dtype, "t")
    base = random.integers(0, 2**32, count, dtype=np.uint64).astype(bits)
    if data.draw(st.booleans()):  # a few exponents only, as weights have
        base &= bits.type((1 << (8 * bits.itemsize - 3)) - 1)
    new = base.copy()
    touched = random.random(count) < data.draw(st.sampled_from([0.0, 0.004, 0.03, 0.1, 0.5, 1.0]))
    new[touched] += bits.type(data.draw(st.integers(1, 2**16 - 1)))
    chosen = data.draw(st.sets(st.integers(1, 255), max_size=MAXIMUM_CLASSES - 1))
    thresholds = (np.array(sorted(chosen), dtype=np.uint64) << np.uint64(8 * bits.itemsize - 9)).astype(np.uint32)
    plain = class_split.split_changes(base, new, thresholds)
    compiled = compiled_split.split_changes(base, new, thresholds)
    assert np.array_equal(plain.positions, np.flatnonzero(base != new))
    assert np.array_equal(compiled.positions, plain.positions)
    assert np.array_equal(compiled.values, plain.values)
    assert compiled.sizes.tolist() == plain.sizes.tolist() == compiled_split.class_sizes(base, thresholds).tolist()
    for one, other in zip(compiled.streams, plain.streams, strict=True):
        assert np.array_equal(one.gaps, other.gaps)
        assert np.array_equal(one.symbols, other.symbols)
        assert (one.gaps.dtype, one.symbols.dtype) == (other.gaps.dtype, other.symbols.dtype)
    for join in (class_split.join_changes, compiled_split.join_changes):
        positions, values = join(base, thresholds, plain.streams, "t")
        assert np.array_equal(positions, plain.positions)
        assert np.array_equal(values, new[touched])


@pytest.mark.timeout(240)
@settings(deadline=None)
@given(st.data())
def test_any_streams_join_alike_or_are_refused_alike(data: st.DataObject) -> None:
    """What a forged patch may say: gaps that leave the class, by one or by billions."""
    count = data.draw(st.sampled_from([1, 255, 256, 600, 1024]))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    base = random.integers(0, 2**16, count, dtype=U16)
    thresholds = np.array([0x2000, 0x4000], dtype=np.uint32)
    scale = data.draw(st.sampled_from([1, 3, 50, 2**31]))
    streams = []
    for size in data.draw(st.tuples(*[st.integers(0, 40)] * 3)):
        gaps = random.integers(0, scale, size).astype(np.uint32)
        streams.append(ClassStreams(gaps, random.integers(0, 2**16 - 1, size, dtype=U16)))
    results = []
    for join in (class_split.join_changes, compiled_split.join_changes):
        try:
            positions, values = join(base, thresholds, streams, "t")
        except WeightError as error:
            results.append(str(error))
        else:
            assert positions.size == 0 or (positions[-1] < count and bool(np.all(np.diff(positions) > 0)))
            results.append((positions.tolist(), values.tolist()))
    assert results[0] == results[1]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("split", [class_split, compiled_split])
@pytest.mark.parametrize("count", [10, 300])
def test_no_change_lies_beyond_the_last_element(split: ModuleType, count: int) -> None:
    """Not even in the zeros that fill up the last block of the compiled pass."""
    base, none = np.zeros(count, dtype=U16), np.zeros(0, dtype=np.uint32)
    for gap in (count - 1, count, count + 1):
        streams = [ClassStreams(np.array([gap], dtype=np.uint32), np.zeros(1, dtype=U16))]
        if gap < count:
            assert split.join_changes(base, none, streams, "t")[0].tolist() == [gap]
        else:
            with pytest.raises(WeightError, match="more elements of a class than there are"):
                split.join_changes(base, none, streams, "t")


@pytest.mark.parametrize("edge", [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC1, 0x7FFF, 0xFFFF])
def test_steps_are_a_bijection_of_all_patterns(edge: int) -> None:
    every = np.arange(65536, dtype=U16)
    base = np.full(65536, edge, dtype=U16)
    symbols = step_symbols(base, every)
    assert np.unique(symbols).size == 65536
    assert symbols[edge] == 65535  # no change, which no patch may say
    assert np.array_equal(apply_steps(base, symbols), every)


def test_order_is_that_of_the_numbers_and_neighbours_are_one_step_apart() -> None:
    every = np.arange(65536, dtype=U16)
    assert np.array_equal(from_ordered(to_ordered(every)), every)
    numbers = (every.astype(np.uint32) << 16).view(np.float32)
    finite = every[np.isfinite(numbers)]
    by_order = finite[np.argsort(to_ordered(finite))]
    assert bool(np.all(np.diff((by_order.astype(np.uint32) << 16).view(np.float32)) >= 0))
    assert set(step_symbols(by_order[:-1], by_order[1:]).tolist()) == {1}
    assert set(step_symbols(by_order[1:], by_order[:-1]).tolist()) == {0}


def test_classes_part_exponents_that_change_unlike() -> None:
    """Small weights change, large ones do not: one threshold between them, whatever else there is."""
    random = np.random.default_rng(0)
    base = random.integers(0x3A00, 0x3E00, 400_000).astype(U16)
    changes = np.where(base < 0x3C00, 0.2, 0.0001)
    new = base + (random.random(base.size) < changes).astype(U16)
    assert choose_thresholds(base, new, "bfloat16").tolist() == [0x3C00]


@pytest.mark.parametrize("dtype", DTYPES)
def test_thresholds_are_exponents_and_few(dtype: str) -> None:
    random = np.random.default_rng(0)
    bits = bit_type(dtype, "t")
    base = random.integers(0, 2**32, 300_000, dtype=np.uint64).astype(bits)
    magnitude = base & bits.type((1 << (8 * bits.itemsize - 1)) - 1)
    exponents = magnitude >> bits.type(mantissa_bits(dtype))
    new = base + (random.random(base.size) < 0.5**exponents).astype(bits)  # every exponent changes at its own rate
    thresholds = choose_thresholds(base, new, dtype)
    assert 1 <= thresholds.size < MAXIMUM_CLASSES
    assert bool(np.all(np.diff(thresholds.astype(np.int64)) > 0))
    assert not np.any(thresholds & ((1 << mantissa_bits(dtype)) - 1))
