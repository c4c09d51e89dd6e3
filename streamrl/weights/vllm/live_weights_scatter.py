"""The inner loop of an update on CPU: compare, write and read back elements of live memory, compiled by numba."""

from __future__ import annotations

from typing import Any

import numba  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]

from streamrl.weights.codec.kernels import compiled

_AHEAD = 128
"""Elements between the one that is written and the one whose cache line is asked for."""

_PREFETCH = "llvm.prefetch.p0i8"
# more lines can be on their way to the second cache than to the first
_FOR_READING = 0
_INTO_L2 = 2
_DATA = 1


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(_: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of ``array[index]`` and go on: LLVM's ``llvm.prefetch``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        made = context.make_array(kind)(context, builder, arguments[0])
        place = cgutils.get_item_pointer(context, builder, kind, made, [arguments[1]], wraparound=False)
        byte = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        form = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, form, _PREFETCH)
        how = [number(value) for value in (_FOR_READING, _INTO_L2, _DATA)]
        builder.call(function, [builder.bitcast(place, byte), *how])
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp), generate


# What this waits for is memory: so each cache line is asked for in time, which halves it, and fetched once, for both
# the comparison and the write. What else is stored or branched on beside that makes the processor wait for what is on
# its way: to keep what was found, in case it is wrong, takes half as long again.
@compiled  # type: ignore[untyped-decorator]
def _scatter(live: Any, elements: Any, old: Any, new: Any, shift: Any) -> int:
    before = 0
    for i in range(elements.size):
        if i + _AHEAD < elements.size:
            _prefetch(live, np.intp(elements[i + _AHEAD]))
        element = elements[i]
        before += live[element] != (np.uint32(old[i]) << shift)
        live[element] = np.uint32(new[i]) << shift
    return before


@compiled  # type: ignore[untyped-decorator]
def _wrong(live: Any, elements: Any, wanted: Any, shift: Any) -> int:
    wrong = 0
    for i in range(elements.size):
        if i + _AHEAD < elements.size:
            _prefetch(live, np.intp(elements[i + _AHEAD]))
        wrong += live[elements[i]] != (np.uint32(wanted[i]) << shift)
    return wrong


def scatter_checked(
    live: npt.NDArray[Any], elements: npt.NDArray[Any], old: npt.NDArray[Any], new: npt.NDArray[Any]
) -> tuple[int, int]:
    """Write ``new`` where ``live[elements]`` equals ``old``, and read it back.

    ``live``: uint16 or uint32, flat. ``elements``: uint32 or int64 [n], ``old`` and ``new``: bit patterns [n], of
    ``live``'s width, or uint16 that ``live`` (uint32) holds in its upper half. Returns how many elements were not
    ``old``, then all of them are made ``old``; and how many are not ``new``: (0, 0)."""
    shift = np.uint32(8 * (live.dtype.itemsize - new.dtype.itemsize))
    before = int(_scatter(live, elements, old, new, shift))
    if before:
        live[elements] = old.astype(live.dtype) << live.dtype.type(shift)
        return before, 0
    return 0, int(_wrong(live, elements, new, shift))
