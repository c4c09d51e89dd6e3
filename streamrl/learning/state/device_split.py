"""What changed in weights that lie on a GPU, found there: only changes come to the host, to be encoded.

The same split into classes as ``comm.weights.class_split``, element for element, by torch alone: a comparison, a
running count for each class, and gathers at the places that changed. On a CPU the compiled form is many times faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamrl.base.errors import WeightError
from streamrl.learning.state.published_weights import upper_halves
from streamrl.weights.bit_patterns import BitArray, BitType, bit_type
from streamrl.weights.codec import class_split, exponent_classes, single_exponents
from streamrl.weights.codec.class_split import ClassStreams, Split, Thresholds
from streamrl.weights.codec.codec import EncodedPatch, WeightPatch, encode_split
from streamrl.weights.codec.exponent_classes import THRESHOLD_BITS
from streamrl.weights.manifest import ShardSpec


class DeviceReader:
    """Reads float32 values of published bfloat16 bits on their device (``BitReader``). The shadow that they are
    compared with lies there too, 2 bytes an element, beside the publisher's own in host memory: what is encoded, and
    what is kept of earlier versions, is made of the few changes there."""

    def __init__(self) -> None:
        self._shadow: dict[int, Tensor] = {}

    def checked(self, given: Any, shard: ShardSpec) -> Tensor:
        """The bits of ``given``, flat float32: int16, and a view of it."""
        values: Tensor = given
        if shard.dtype != "bfloat16" or values.dtype != torch.float32 or values.numel() != shard.count:
            raise WeightError(
                f"tensor {shard.name!r} ({shard.dtype}) was given as {values.numel()} elements of {values.dtype} on "
                f"{values.device}; its shard is {shard.count} of bfloat16, given as float32 values"
            )
        return upper_halves(values)

    def complete(self, parts: Sequence[Any], dtype: str) -> BitArray:
        """All elements of a unit, in host memory."""
        return _to_host(_together(parts), bit_type(dtype, "on the device"))

    def changes(self, unit: int, parts: Sequence[Any], shadow: BitArray, dtype: str) -> EncodedPatch | None:
        """See ``encode_on_device``. The first time, the shadow comes from the host."""
        new, base = _together(parts), self._shadow.get(unit)
        if base is None:
            base = self._shadow[unit] = _from_host(shadow, new.device).clone()
        return encode_on_device(new, base, dtype)

    @torch.no_grad()
    def advance(self, patches: Mapping[int, WeightPatch]) -> None:
        """In proportion to what changed."""
        for unit, patch in patches.items():
            shadow = self._shadow.get(unit)
            if shadow is not None and patch.positions is not None:
                places = torch.from_numpy(patch.positions).to(shadow.device)
                shadow[places] = _from_host(patch.values, shadow.device)


@torch.no_grad()
def encode_on_device(new: Tensor, base: Tensor, dtype: str) -> EncodedPatch | None:
    """As ``codec.encode_patch``, and the same bytes. ``new``, ``base``: bits as int16 or int32 [n] on one device, of
    the published dtype ``dtype``, which is what ``tensor.view(torch.int16)`` gives. None when nothing differs."""
    bits, elements = bit_type(dtype, "on the device"), new.numel()
    every = single_exponents.sample_every(elements)
    old, now = (_to_host(_blocks(side, every), bits) for side in (base, new))
    found = class_split.sample_changes(old, now, 1)
    thresholds = single_exponents.thresholds_of_sample(found, elements, dtype)
    single = thresholds is not None
    if thresholds is None:
        every = exponent_classes.sample_every(elements)
        old, now = (_to_host(exponent_classes.sample_blocks(side, every), bits) for side in (base, new))
        thresholds = exponent_classes.thresholds_of_sample(old, now, every, dtype)
    split = split_on_device(base, new, thresholds, bits)
    return encode_split(split, thresholds, elements, lambda: _to_host(new, bits), single=single)


def split_on_device(base: Tensor, new: Tensor, thresholds: Thresholds, bits: BitType) -> Split:
    """See ``class_split.split_changes``. ``base``, ``new``: int16 or int32 [n] on one device."""
    width = 8 * bits.itemsize
    magnitudes = base & ((1 << (width - 1)) - 1)
    upper = (magnitudes >> (width - 1 - THRESHOLD_BITS)).to(torch.uint8)
    positions = torch.nonzero(base != new).flatten()
    old, now = base[positions], new[positions]
    symbols, upper_changed = _step_symbols(old, now, width), upper[positions]
    streams, sizes = [], []
    edges = [0, *(int(threshold) >> (width - 1 - THRESHOLD_BITS) for threshold in thresholds), 256]
    for first, end in pairwise(edges):
        members = (upper >= first) & (upper <= end - 1)
        chosen = (upper_changed >= first) & (upper_changed <= end - 1)
        passed = members.cumsum(0, dtype=torch.int32)
        ranks = passed[positions[chosen]].to(torch.int64) - 1
        gaps = torch.diff(ranks, prepend=ranks.new_full((1,), -1)) - 1
        sizes.append(passed[-1:])
        streams.append(ClassStreams(_unsigned(gaps, np.dtype("<u4")), _unsigned(symbols[chosen], bits)))
    totals = torch.cat(sizes).to(torch.int64).cpu().numpy() if base.numel() else np.zeros(len(sizes), dtype=np.int64)
    return Split(positions.cpu().numpy(), _to_host(now, bits), streams, totals)


def _step_symbols(old: Tensor, now: Tensor, width: int) -> Tensor:
    """See ``ordered_bits.step_symbols``; int64."""
    full, top = (1 << width) - 1, 1 << (width - 1)
    sides = [side.to(torch.int64) & full for side in (old, now)]
    before, after = (torch.where((side & top) != 0, side ^ full, side | top) for side in sides)
    steps = (((after - before) & full) ^ top) - top
    return ((steps << 1) ^ (steps >> 63)) - 1


def _blocks(bits: Tensor, every: int) -> Tensor:
    """One block out of ``every``, as ``class_split.sample_changes`` reads them."""
    block = class_split.SAMPLE_BLOCK
    starts = torch.arange(0, bits.numel(), every * block, device=bits.device)
    places = (starts[:, None] + torch.arange(block, device=bits.device)).flatten()
    return bits[places[places < bits.numel()]]


def _unsigned(numbers: Tensor, wanted: np.dtype[Any]) -> Any:
    """Numbers that fit in ``wanted``, on the host."""
    signed = torch.int16 if wanted.itemsize == 2 else torch.int32
    return numbers.to(signed).cpu().numpy().view(wanted)


def _together(parts: Sequence[Any]) -> Tensor:
    """One after the other."""
    joined: Tensor = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return joined


def _from_host(bits: BitArray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(f"i{bits.itemsize}")).to(device)


def _to_host(bits: Tensor, wanted: BitType) -> BitArray:
    array: BitArray = bits.cpu().numpy().view(wanted)
    return array
