"""Changed elements, split by class: how far apart they lie within their class, and how far each one moved.

The plain form, in numpy: the definition that the compiled single pass (``compiled_split``) is tested against, and what
small shards use, since a process that never meets a large one is spared the compiler and its 70 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.base.errors import WeightError
from streamrl.weights.bit_patterns import BitArray, PositionArray
from streamrl.weights.codec.exponent_classes import THRESHOLD_BITS
from streamrl.weights.ordered_bits import apply_steps, step_symbols

SAMPLE_BLOCK = 256

GapArray = npt.NDArray[np.uint32]
Thresholds = npt.NDArray[np.uint32]


class ClassStreams(msgspec.Struct, frozen=True, eq=False):
    """The changes of one class, in the order of their positions.

    ``gaps``: uint32 [n], elements of the class between a change and the one before it. ``symbols``: uint16 or
    uint32 [n], as in ``ordered_bits.step_symbols``.
    """

    gaps: GapArray
    symbols: BitArray


class Split(msgspec.Struct, frozen=True, eq=False):
    """What changed: ``positions`` int64 [n] increasing, their new ``values``, and the same by class. ``sizes``:
    elements of each class, int64 [classes]."""

    positions: PositionArray
    values: BitArray
    streams: Sequence[ClassStreams]
    sizes: npt.NDArray[np.int64]


def split_changes(base: BitArray, new: BitArray, thresholds: Thresholds) -> Split:
    """Compare bit for bit, and split what differs by the class of its base pattern."""
    differs = base != new
    positions = np.flatnonzero(differs).astype(np.int64, copy=False)
    classes = classes_of(base, thresholds)
    symbols, kinds = step_symbols(base[positions], new[positions]), classes[positions]
    streams, sizes = [], []
    for kind in range(thresholds.size + 1):
        of_class = differs[classes == kind]
        sizes.append(of_class.size)
        ranks = np.flatnonzero(of_class)
        gaps = np.diff(ranks, prepend=-1) - 1
        streams.append(ClassStreams(gaps.astype(np.uint32), symbols[kinds == kind]))
    return Split(positions, new[positions], streams, np.array(sizes, dtype=np.int64))


def class_sizes(base: BitArray, thresholds: Thresholds) -> npt.NDArray[np.int64]:
    """Elements of each class, int64 [classes]."""
    classes = classes_of(base, thresholds)
    return np.array([np.count_nonzero(classes == kind) for kind in range(thresholds.size + 1)], dtype=np.int64)


def sample_changes(base: BitArray, new: BitArray, every: int) -> tuple[int, int, int]:
    """Of one out of ``every`` blocks of ``SAMPLE_BLOCK`` elements: the highest upper byte of a magnitude, that of a
    change (-1: there is none), and how many elements change."""
    starts = range(0, base.size, every * SAMPLE_BLOCK)
    old, now = (np.concatenate([bits[:0], *(bits[s : s + SAMPLE_BLOCK] for s in starts)]) for bits in (base, new))
    width = 8 * base.dtype.itemsize
    upper = (old & base.dtype.type((1 << (width - 1)) - 1)) >> base.dtype.type(width - 1 - THRESHOLD_BITS)
    changing = upper[old != now]
    return int(upper.max(initial=0)), int(changing.max(initial=0)) if changing.size else -1, changing.size


def join_changes(
    base: BitArray, thresholds: Thresholds, streams: Sequence[ClassStreams], tensor: str
) -> tuple[PositionArray, BitArray]:
    """The inverse: positions (int64 [n], increasing) and absolute new values.

    Raises ``WeightError`` where a change lies beyond the last element of its class.
    """
    classes = classes_of(base, thresholds)
    positions = []
    for kind, stream in enumerate(streams):
        members = np.flatnonzero(classes == kind)
        ranks = np.cumsum(stream.gaps.astype(np.int64) + 1) - 1
        if ranks.size and ranks[-1] >= members.size:
            raise beyond_class(tensor)
        positions.append(members[ranks])
    joined = np.concatenate(positions).astype(np.int64, copy=False)
    symbols = np.concatenate([stream.symbols for stream in streams])
    order = np.argsort(joined, kind="stable")
    joined = joined[order]
    return joined, apply_steps(base[joined], symbols[order])


def classes_of(base: BitArray, thresholds: Thresholds) -> npt.NDArray[np.uint8]:
    """The class (uint8 [n]) of each pattern: how many thresholds its magnitude reaches."""
    magnitudes = base & base.dtype.type((1 << (8 * base.dtype.itemsize - 1)) - 1)
    classes = np.zeros(base.size, dtype=np.uint8)
    for threshold in thresholds:
        classes += magnitudes >= base.dtype.type(threshold)
    return classes


def beyond_class(tensor: str) -> WeightError:
    """A patch that does not fit on this base."""
    return WeightError(f"patch of {tensor!r} changes more elements of a class than there are: it has another base")
