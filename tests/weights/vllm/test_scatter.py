"""The inner loop of an update: what is listed is written, and what was not there as expected is found."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from streamrl.weights.vllm.live_weights_scatter import _AHEAD, scatter_checked

SIZES = (0, 1, _AHEAD, 3 * _AHEAD + 5)


def update(size: int, runtime: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Live memory, elements of it, what is there and what shall be; uint32 memory holds uint16 patterns on top."""
    random = np.random.default_rng(seed)
    live = random.integers(0, 2**16, 5 * size + 3, dtype=np.uint16)
    elements = np.sort(random.choice(live.size, size, replace=False)).astype(np.uint32)
    old = live[elements]
    new = old ^ random.integers(1, 2**16, size, dtype=np.uint16)
    return (live if runtime == "uint16" else live.astype(np.uint32) << 16), elements, old, new


@pytest.mark.parametrize("runtime", ["uint16", "uint32"])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_listed_is_written_and_nothing_else(size: int, runtime: str) -> None:
    live, elements, old, new = update(size, runtime)
    expected = live.copy()
    expected[elements] = new if runtime == "uint16" else new.astype(np.uint32) << 16
    assert scatter_checked(live, elements, old, new) == (0, 0)
    assert np.array_equal(live, expected)


@pytest.mark.parametrize("runtime", ["uint16", "uint32"])
@pytest.mark.parametrize("size", SIZES[1:])
def test_different_elements_are_counted_and_unchanged(size: int, runtime: str) -> None:
    """Elements that hold something else are counted, and nothing is written."""
    for index in {0, size // 2, size - 1}:
        live, elements, old, new = update(size, runtime)
        before = live.copy()
        live[elements[index]] ^= 1
        assert scatter_checked(live, elements, old, new) == (1, 0)
        assert np.array_equal(live, before)


@pytest.mark.parametrize("first", [0, 1, _AHEAD, 3 * _AHEAD + 3])
def test_an_element_that_does_not_keep_what_was_written_is_found(first: int) -> None:
    """One that is listed twice: the second write hides the first, as another writer would."""
    live, elements, old, new = update(SIZES[-1], "uint16")
    elements[first + 1], old[first + 1] = elements[first], new[first]
    new[first + 1] = new[first] ^ 5
    assert scatter_checked(live, elements, old, new) == (0, 1)
