"""The state hash is a sum over elements, incremental over changes, and sees place, name and bits."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.base.messages import HASH_MODULUS
from streamrl.weights.codec.kernels import compiled
from streamrl.weights.codec.state_hash import hash_elements, hash_range, tensor_key


def bits_of(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 65536, count, dtype=np.uint16)


@given(st.integers(1, 5_000), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_is_incremental_over_changes(count: int, seed: int, density: float) -> None:
    old = bits_of(count, seed)
    new = old.copy()
    positions = np.flatnonzero(np.random.default_rng(seed + 1).random(count) < density)
    new[positions] ^= 0x8001
    updated = hash_range("t", 0, old) - hash_elements("t", positions, old[positions])
    updated += hash_elements("t", positions, new[positions])
    assert updated % HASH_MODULUS == hash_range("t", 0, new)


def test_sees_name_place_and_bits() -> None:
    zeros = np.zeros(4, np.uint16)
    swapped = np.array([1, 2], np.uint16)
    hashes = {
        hash_range("a", 0, zeros),
        hash_range("b", 0, zeros),
        hash_range("a", 1, zeros),
        hash_range("a", 0, zeros[:3]),
        hash_range("a", 0, np.array([0, 0, 0, 0x8000], np.uint16)),
        hash_range("a", 0, swapped),
        hash_range("a", 0, swapped[::-1]),
    }
    assert len(hashes) == 7


def test_every_pattern_at_one_place_differs() -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    place = np.array([12345])
    assert len({hash_elements("t", place, patterns[i : i + 1]) for i in range(65536)}) == 65536


def test_value_is_fixed() -> None:
    """The hash is on the wire: another value means another protocol version."""
    assert hash_range("model.embed_tokens.weight", 5, np.array([0, 1, 0x3F80], np.uint16)) == FIXED


@pytest.mark.parametrize("bits", [np.uint16, np.uint32])
def test_terms_are_two_rounds_of_splitmix64(bits: type[np.generic]) -> None:
    """Written once more, in Python's integers."""

    def finalise(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % HASH_MODULUS
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % HASH_MODULUS
        return x ^ (x >> 31)

    def term(place: int, value: int) -> int:
        at = finalise((place * 0x9E3779B97F4A7C15 + int(tensor_key("t"))) % HASH_MODULUS)
        return finalise(at ^ ((value + 1) * 0xD6E8FEB86659FD93 % HASH_MODULUS))

    random = np.random.default_rng(0)
    values = random.integers(0, 2**32, 500, dtype=np.uint64).astype(bits)
    places = np.sort(random.choice(2**40, 500, replace=False))
    terms = (term(place, value) for place, value in zip(places.tolist(), values.tolist(), strict=True))
    expected = sum(terms) % HASH_MODULUS
    assert hash_elements("t", places, values) == expected
    expected = sum(term(2**35 + place, value) for place, value in enumerate(values.tolist())) % HASH_MODULUS
    assert hash_range("t", 2**35, values) == expected


FIXED = 0xAA8E3D95D1259493


def test_a_kernel_compiles_without_a_place_for_its_cache() -> None:
    """The machine code of a function is kept where numba finds a directory; elsewhere it is compiled each time."""
    namespace: dict[str, Any] = {}
    exec(compile("def double(x):\n    return 2 * x\n", "<no file>", "exec"), namespace)
    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(cache=True)(namespace["double"])
    assert compiled(namespace["double"])(21) == 42
