"""How few bits a weight update could take, measured on it: the yardstick of the codec.

An update is which elements change, and what they change to. Counted without a context, with ``k`` of ``n`` elements
changed, positions take ``n * H(k / n)`` bits and changes the order-0 entropy of their steps (the difference of the bit
patterns taken as ordered integers). Counted within the classes of equal old exponent, which the receiver knows, both
take less. Neither includes the tables that a code needs, so that no code of its kind gets below."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamrl.weights.codec.bits import BitArray, exponents_of, move_symbols

_BLOCK = 1 << 20
_EXPONENTS = 256

CountArray = npt.NDArray[np.int64]


class UpdateCounts:
    """Elements and changes by old exponent, and changes by (old exponent, step). Add tensors of one dtype."""

    def __init__(self) -> None:
        self.elements: CountArray = np.zeros(_EXPONENTS, dtype=np.int64)
        self.changed: CountArray = np.zeros(_EXPONENTS, dtype=np.int64)
        self._cells: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._cell_counts: CountArray = np.empty(0, dtype=np.int64)

    @classmethod
    def of(cls, old: BitArray, new: BitArray, dtype: str) -> UpdateCounts:
        """Counts of one tensor, ``old`` and ``new`` uint16 or uint32 [n]."""
        counts = cls()
        for start in range(0, old.size, _BLOCK):
            before, after = old[start : start + _BLOCK], new[start : start + _BLOCK]
            exponents = exponents_of(before, dtype)
            counts.elements += np.bincount(exponents, minlength=_EXPONENTS)
            at = np.flatnonzero(before != after)
            if at.size:
                counts.changed += np.bincount(exponents[at], minlength=_EXPONENTS)
                cells = exponents[at].astype(np.uint64) << np.uint64(32)
                counts._merge(*np.unique(cells | move_symbols(before[at], after[at]), return_counts=True))
        return counts

    def add(self, other: UpdateCounts) -> None:
        """Count another tensor too."""
        self.elements += other.elements
        self.changed += other.changed
        self._merge(other._cells, other._cell_counts)

    def _merge(self, cells: npt.NDArray[np.uint64], counts: CountArray) -> None:
        joined = np.concatenate((self._cells, cells))
        self._cells, place = np.unique(joined, return_inverse=True)
        merged = np.zeros(self._cells.size, dtype=np.int64)
        np.add.at(merged, place, np.concatenate((self._cell_counts, counts)))
        self._cell_counts = merged

    def context_free_bits(self) -> float:
        """Positions and steps, each by its frequency alone."""
        symbols, place = np.unique(self._cells & np.uint64(0xFFFFFFFF), return_inverse=True)
        counts = np.zeros(symbols.size, dtype=np.int64)
        np.add.at(counts, place, self._cell_counts)
        changed = self.changed.sum(keepdims=True)
        return _binary_bits(self.elements.sum(keepdims=True), changed) + _self_information(counts)

    def conditional_bits(self) -> float:
        """Positions and steps by their frequency among elements of the same old exponent."""
        by_cell = _self_information(self._cell_counts)
        return _binary_bits(self.elements, self.changed) + by_cell - _self_information(self.changed)


def _binary_bits(elements: CountArray, changed: CountArray) -> float:
    """Sum over classes of ``n * H(k / n)``."""
    return _n_log_n(elements) - _n_log_n(changed) - _n_log_n(elements - changed)


def _self_information(counts: CountArray) -> float:
    """``-sum of c * log2(c / total)``."""
    return _n_log_n(counts.sum(keepdims=True)) - _n_log_n(counts)


def _n_log_n(counts: CountArray) -> float:
    used = counts[counts > 0].astype(np.float64)
    return float((used * np.log2(used)).sum())
