"""The split by torch, which runs where the bits lie, gives what the compiled one gives; here on CPU tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.comm.weights import compiled_paths, compiled_split, single_exponents
from streamrl.comm.weights.bit_patterns import bit_type
from streamrl.comm.weights.codec import encode_patch
from streamrl.comm.weights.exponent_classes import MAXIMUM_CLASSES
from streamrl.comm.weights.synthetic_updates import adam_step, draw_weights
from streamrl.learning.device_split import encode_on_device, split_on_device

pytestmark = pytest.mark.timeout(240)  # the first compiles
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def tensor_of(bits: np.ndarray, device: str) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"i{bits.itemsize}")).to(device)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_patterns_split_as_the_compiled_pass_does(device: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    bits = bit_type(dtype, "t")
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    count = data.draw(st.sampled_from([0, 1, 7, 256, 700]))
    base = random.integers(0, 2**32, count, dtype=np.uint64).astype(bits)
    new = np.where(random.random(count) < data.draw(st.sampled_from([0.0, 0.02, 0.5, 1.0])), ~base, base).astype(bits)
    if data.draw(st.booleans()):
        new = np.where(base != new, random.integers(0, 2**32, count, dtype=np.uint64).astype(bits), base)
    chosen = data.draw(st.sets(st.integers(1, 255), max_size=MAXIMUM_CLASSES - 1))
    thresholds = (np.array(sorted(chosen), dtype=np.uint64) << np.uint64(8 * bits.itemsize - 9)).astype(np.uint32)
    expected = compiled_split.split_changes(base, new, thresholds)
    split = split_on_device(tensor_of(base, device), tensor_of(new, device), thresholds, bits)
    assert np.array_equal(split.positions, expected.positions)
    assert np.array_equal(split.values, expected.values)
    assert split.sizes.tolist() == expected.sizes.tolist()
    for one, other in zip(split.streams, expected.streams, strict=True):
        assert np.array_equal(one.gaps, other.gaps)
        assert np.array_equal(one.symbols, other.symbols)
        assert (one.gaps.dtype, one.symbols.dtype) == (other.gaps.dtype, other.symbols.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("elements", [5_000, 600_001])
@pytest.mark.parametrize("rate", [0.0, 3e-6, 1e-4])
def test_the_patch_is_the_same_to_the_byte(
    device: str, elements: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few changes and many, so both codes; nothing, and half."""
    monkeypatch.setattr(compiled_paths, "_FROM_ELEMENTS", 1)
    monkeypatch.setattr(single_exponents, "MANY_CHANGES", 1 << 13)
    weights = draw_weights(elements, seed=3, place=0)
    base, new = adam_step(weights, rate, seed=1, place=0) if rate else (weights, weights.copy())
    expected = encode_patch(new, base, "bfloat16")
    encoded = encode_on_device(tensor_of(new, device), tensor_of(base, device), "bfloat16")
    if expected is None:
        assert encoded is None
        return
    assert encoded is not None
    assert encoded.encoded == expected.encoded
    assert encoded.listed_elements == expected.listed_elements
    assert np.array_equal(encoded.patch.values, expected.patch.values)
