"""What patches cost on updates like an optimizer's, against the entropy measured on the same update."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_updates import (
    adam_step,
    draw_weights,
    from_bfloat16,
    learning_rate_for,
    to_bfloat16,
    uniform_step,
)
from update_entropy import UpdateCounts

from streamrl.weights import compiled_paths
from streamrl.weights.codec.codec import decode_patch, encode_patch

ELEMENTS = 2_000_000


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has met a large tensor, whichever test is the first."""
    monkeypatch.setattr(compiled_paths, "_FROM_ELEMENTS", compiled_paths._FROM_ELEMENTS_WHEN_LOADED)


@pytest.fixture(scope="module")
def weights() -> np.ndarray:
    return draw_weights(ELEMENTS, seed=3, place=0)


def size_of(base: np.ndarray, new: np.ndarray, dtype: str = "bfloat16") -> int:
    """Bytes of the patch, which is checked to be exact."""
    encoded = encode_patch(new, base, dtype)
    assert encoded is not None
    patch = decode_patch(encoded.encoded, base.dtype, base.size, "t", base)
    held = base.copy()
    held[slice(None) if patch.positions is None else patch.positions] = patch.values
    assert np.array_equal(held, new)
    return len(encoded.encoded)


@pytest.mark.parametrize("density", [0.005, 0.01, 0.03])
def test_less_than_a_byte_a_change_after_an_adam_step(weights: np.ndarray, density: float) -> None:
    rate = learning_rate_for(density, weights[: 1 << 17])
    base, new = adam_step(weights, rate, seed=1, place=0)
    changed = int(np.count_nonzero(base != new))
    size = size_of(base, new)
    assert size <= 0.85 * changed
    assert size <= 1.25 * UpdateCounts.of(base, new, "bfloat16").conditional_bits() / 8


@pytest.mark.parametrize(("elements", "most"), [(16_384, 1.25), (65_536, 1.1), (262_144, 1.06)])
def test_small_tensors_cost_little_more_than_the_entropy_of_the_model(elements: int, most: float) -> None:
    """The tables of each would cost half as much again."""
    rate = learning_rate_for(0.01, draw_weights(1 << 17, seed=3, place=0))
    total, counts = 0, UpdateCounts()
    for place in range(ELEMENTS // 4 // elements):
        base, new = adam_step(draw_weights(elements, seed=3, place=place), rate, seed=1, place=place)
        counts.add(UpdateCounts.of(base, new, "bfloat16"))
        total += size_of(base, new)
    assert total <= 0.85 * counts.changed.sum()
    assert total <= most * counts.conditional_bits() / 8


@pytest.mark.parametrize(("elements", "rate"), [(131_072, 1e-6), (131_072, 1e-5), (ELEMENTS, 3e-7), (ELEMENTS, 1e-6)])
def test_first_steps_cost_little_more_than_a_bit_a_change(rate: float, elements: int) -> None:
    """The first step of AdamW from a published checkpoint moves every element by the learning rate, up or down: nearly
    all elements of the small exponents change, by a number of steps that their exponent says, and no other."""
    random = np.random.default_rng(0)
    total, counts = 0, UpdateCounts()
    for place in range(max(1, 524_288 // elements)):
        base = draw_weights(elements, seed=5, place=place)
        moves = random.choice(np.array([-rate, rate], dtype=np.float32), elements)
        moves[random.random(elements) < 0.005] = 0.0
        new = to_bfloat16(from_bfloat16(base) + moves)
        counts.add(UpdateCounts.of(base, new, "bfloat16"))
        total += size_of(base, new)
    assert total <= 1.25 * counts.conditional_bits() / 8


def test_a_seventh_of_dense_when_half_of_the_elements_change(weights: np.ndarray) -> None:
    """The issue asks for 0.4 of dense."""
    base, new = adam_step(weights, learning_rate_for(0.5, weights[: 1 << 17]), seed=1, place=0)
    assert size_of(base, new) <= new.nbytes / 5


@pytest.mark.parametrize("density", [0.001, 0.01, 0.2])
def test_positions_without_a_pattern_cost_their_entropy(weights: np.ndarray, density: float) -> None:
    base, new = uniform_step(weights, density, seed=1, place=0)
    counts = UpdateCounts.of(base, new, "bfloat16")
    assert size_of(base, new) <= 1.05 * counts.context_free_bits() / 8


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_noise_is_no_larger_than_dense(dtype: type[np.uint16]) -> None:
    random = np.random.default_rng(0)
    base, new = (random.integers(0, 2**32, 100_000, dtype=np.uint64).astype(dtype) for _ in range(2))
    name = "bfloat16" if dtype is np.uint16 else "float32"
    assert size_of(base, new, name) <= 1.001 * new.nbytes
    anchor = encode_patch(new, None, name)
    assert anchor is not None
    assert len(anchor.encoded) <= 1.001 * new.nbytes


def test_a_whole_model_one_step_further_is_next_to_nothing(weights: np.ndarray) -> None:
    assert size_of(weights, weights + np.uint16(1)) < weights.nbytes / 10


def test_other_weights_altogether_cost_what_an_anchor_does(weights: np.ndarray) -> None:
    assert size_of(weights, draw_weights(ELEMENTS, seed=4, place=0)) < 0.70 * weights.nbytes


def test_an_anchor_is_two_thirds_of_dense(weights: np.ndarray) -> None:
    anchor = encode_patch(weights, None, "bfloat16")
    assert anchor is not None
    assert len(anchor.encoded) < 0.70 * weights.nbytes
