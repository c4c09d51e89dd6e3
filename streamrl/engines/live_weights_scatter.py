"""The inner loop of an update on CPU: compare, write and read back elements of live memory, compiled by numba."""

from __future__ import annotations

from typing import Any

import numba  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

_READ_BACK = 64
"""One element in so many."""


# What this waits for is memory, so each cache line is fetched once, for both the comparison and the write. What else
# is stored or branched on beside that makes the processor wait for what is on its way: to keep what was found, in case
# it is wrong, takes half as long again, and so does reading everything back. A sample finds what no store of this very
# thread explains (a wrong storage, another writer); every element is compared with the mirror in the audits, and when
# it changes again.
@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _scatter(live: Any, elements: Any, old: Any, new: Any, shift: Any) -> int:
    before = 0
    for i in range(elements.size):
        element = elements[i]
        before += live[element] != (np.uint32(old[i]) << shift)
        live[element] = np.uint32(new[i]) << shift
    return before


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _wrong(live: Any, elements: Any, wanted: Any, shift: Any) -> int:
    wrong = 0
    for i in range(0, elements.size, _READ_BACK):
        wrong += live[elements[i]] != (np.uint32(wanted[i]) << shift)
    return wrong


def scatter_checked(
    live: npt.NDArray[Any], elements: npt.NDArray[Any], old: npt.NDArray[Any], new: npt.NDArray[Any]
) -> tuple[int, int]:
    """Where ``live[elements]`` equals ``old``, make it ``new``, and read a sample back.

    ``live``: uint16 or uint32, flat. ``elements``: uint32 or int64 [n], ``old`` and ``new``: bit patterns [n], of
    ``live``'s width, or uint16 that ``live`` (uint32) holds in its upper half.
    Returns how many elements were not ``old``, then all of them are made ``old``; and how many of the sample are not
    ``new``: (0, 0).
    """
    shift = np.uint32(8 * (live.dtype.itemsize - new.dtype.itemsize))
    before = int(_scatter(live, elements, old, new, shift))
    if before:
        live[elements] = old.astype(live.dtype) << live.dtype.type(shift)
        return before, 0
    return 0, int(_wrong(live, elements, new, shift))
