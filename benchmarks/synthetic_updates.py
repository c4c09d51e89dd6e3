"""Updates to measure with where none was recorded: what an AdamW step on noise does to published weights.

Masters in float32 lay on the grid of the published dtype ``STEPS`` optimizer steps ago, as they do when training starts
from a published checkpoint. Gradients are independent normal noise with unit variance, and Adam's second moment has
settled at it; then its steps are sums of the noise with known weights, the displacement before the last step and that
step itself are two correlated normal numbers, and ``STEPS`` steps cost two draws an element (Kingma and Ba, 2015,
algorithm 1; beta1 0.9). The learning rate is chosen so that the wanted share of published elements changes."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.base.errors import WeightError
from streamrl.weights.codec.bits import apply_moves

STEPS = 20
SIGMA = 0.02
"""Spread of the weights of a synthetic model."""

_BETA1 = 0.9
_WEIGHTS, _STEP, _SEARCH = 1, 2, 3  # what random streams are for
_BLOCK = 1 << 16  # elements drawn at once: temporaries stay in the cache
FloatArray = npt.NDArray[np.float32]
HalfArray = npt.NDArray[np.uint16]
"""Bits of bfloat16."""


class Pattern(StrEnum):
    """Which elements of a synthetic update change."""

    ADAM = "adam"
    UNIFORM = "uniform"
    """Any, with equal chance, by one step up or down: nothing is to be learned from the old weights."""


class TensorShape(msgspec.Struct, frozen=True):
    """A tensor of a synthetic model."""

    name: str
    elements: int


def synthetic_model(parameters: int) -> list[TensorShape]:
    """Blocks of a decoder (four square projections, three of an MLP four times as wide, two norms) up to ``parameters``
    elements; the last tensor is cut to fit."""
    width = 1 << max(5, min(12, int(math.log2(max(1.0, math.sqrt(parameters / 128))))))
    block = [(f"self_attn.{name}_proj", width * width) for name in "qkvo"]
    block += [(f"mlp.{name}_proj", 4 * width * width) for name in ("gate", "up", "down")]
    block += [("input_layernorm", width), ("post_attention_layernorm", width)]
    shapes: list[TensorShape] = []
    left, layer = parameters, 0
    while left:
        for name, elements in block:
            if left:
                shapes.append(TensorShape(f"model.layers.{layer}.{name}.weight", min(left, elements)))
                left -= shapes[-1].elements
        layer += 1
    return shapes


def noise_of_step(steps: int = STEPS) -> tuple[float, float, float]:
    """Displacement ``a * x`` before step ``steps`` and the step ``b * x + c * y``, for a learning rate of 1.

    ``x`` and ``y`` are independent standard normal numbers; returns (a, b, c)."""
    rows = [
        [(1 - _BETA1) * _BETA1 ** (step - j) / (1 - _BETA1**step) if j <= step else 0.0 for j in range(1, steps + 1)]
        for step in range(1, steps + 1)
    ]
    each = np.array(rows)
    before, last = each[:-1].sum(axis=0), each[-1]
    a = float(np.sqrt(before @ before))
    b = float(before @ last / a) if a else 0.0
    return a, b, math.sqrt(max(0.0, float(last @ last) - b * b))


def to_bfloat16(values: FloatArray) -> HalfArray:
    """Bits of finite float32 values in bfloat16, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def from_bfloat16(bits: HalfArray) -> FloatArray:
    """The values of bfloat16 bits in float32, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def adam_step(
    weights: HalfArray, learning_rate: float, seed: int, place: int, use: int = _STEP
) -> tuple[HalfArray, HalfArray]:
    """Bits before and after a noise step, uint16 [n] each. ``weights``: bfloat16 bits where training started."""
    old, new = np.empty(weights.size, dtype=np.uint16), np.empty(weights.size, dtype=np.uint16)
    generator = _generator(seed, place, use)
    a, b, c = (np.float32(learning_rate * factor) for factor in noise_of_step())
    for start in range(0, weights.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        masters = from_bfloat16(np.asarray(weights[block]))
        x = generator.standard_normal(masters.size, dtype=np.float32)
        y = generator.standard_normal(masters.size, dtype=np.float32)
        masters += a * x
        old[block] = to_bfloat16(masters)
        masters += b * x + c * y
        new[block] = to_bfloat16(masters)
    return old, new


def uniform_step(weights: HalfArray, density: float, seed: int, place: int) -> tuple[HalfArray, HalfArray]:
    """Bits before and after a step that moves each element with chance ``density`` to the next number up or down."""
    generator = _generator(seed, place, _STEP)
    old = weights.copy()
    new = old.copy()
    for start in range(0, old.size, _BLOCK):
        block = new[start : start + _BLOCK]
        chosen = np.flatnonzero(generator.random(block.size, dtype=np.float32) < density)
        directions = generator.integers(0, 2, chosen.size, dtype=np.uint16)
        block[chosen] = apply_moves(block[chosen], directions)
    return old, new


def _generator(seed: int, place: int, use: int) -> np.random.Generator:
    """A stream of its own for each tensor (``place``) and use. The use is last and never 0: numpy takes seeds that
    differ in zeros at their end for the same."""
    return np.random.Generator(np.random.SFC64([seed, place, use]))


def draw_weights(elements: int, seed: int, place: int) -> HalfArray:
    """bfloat16 bits of normal weights with a spread of ``SIGMA``."""
    bits = np.empty(elements, dtype=np.uint16)
    generator = _generator(seed, place, _WEIGHTS)
    for start in range(0, elements, _BLOCK):
        drawn = generator.standard_normal(min(_BLOCK, elements - start), dtype=np.float32)
        bits[start : start + _BLOCK] = to_bfloat16(drawn * np.float32(SIGMA))
    return bits


def learning_rate_for(density: float, sample: HalfArray) -> float:
    """The learning rate at which a noise step changes ``density`` of ``sample`` (bfloat16 bits). Raises ``WeightError``
    for a density that no step reaches: zeros and very large weights stay what they are."""

    def reached(rate: float) -> float:
        old, new = adam_step(sample, rate, 0, 0, _SEARCH)
        return float(np.count_nonzero(old != new)) / max(1, sample.size)

    low, high = 1e-12, 1e-12
    while reached(high) < density:
        low, high = high, high * 16
        if high > 1e3:
            raise WeightError(f"no noise step changes {density:.1%} of these weights: give a smaller --density")
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(middle) >= density else (middle, high)
    return high
