"""The inner loop of an update on CPU: compare, write and read back elements of live memory, compiled by numba."""

from __future__ import annotations

from typing import Any

import numba  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

HELD = -1
"""All elements held what they should, before and after."""

_BLOCK = 512  # elements: their cache lines are still near when they are read back


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _scatter(live: Any, elements: Any, old: Any, new: Any, shift: Any) -> tuple[int, bool]:
    start, count = 0, elements.size
    while start < count:
        stop = min(count, start + _BLOCK)
        wrong = np.uint32(0)
        for i in range(start, stop):
            wrong |= live[elements[i]] ^ (np.uint32(old[i]) << shift)
        if wrong != 0:
            return start, False
        for i in range(start, stop):
            live[elements[i]] = np.uint32(new[i]) << shift
        for i in range(start, stop):
            wrong |= live[elements[i]] ^ (np.uint32(new[i]) << shift)
        if wrong != 0:
            return start, True
        start = stop
    return HELD, True


def scatter_checked(
    live: npt.NDArray[Any], elements: npt.NDArray[Any], old: npt.NDArray[Any], new: npt.NDArray[Any]
) -> tuple[int, bool]:
    """Where ``live[elements]`` equals ``old``, make it ``new``, a block at a time, and read each block back.

    ``live``: uint16 or uint32, flat. ``elements``: uint32 or int64 [n], ``old`` and ``new``: bit patterns [n], of
    ``live``'s width, or uint16 that ``live`` (uint32) holds in its upper half.
    Returns ``(HELD, True)``, or the first index of the block that did not hold and whether it had been written.
    Blocks before that one are written.
    """
    shift = np.uint32(8 * (live.dtype.itemsize - new.dtype.itemsize))
    return _scatter(live, elements, old, new, shift)  # type: ignore[no-any-return]
