"""The inner loop of a commit on a CPU: compare, write and read back elements of live memory, compiled by numba.
``live_weights.py`` calls it in vLLM's worker processes."""

from __future__ import annotations

from typing import Any

import numba  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]
from numpy.typing import NDArray

from streamrl.weights.codec.kernels import compiled

_AHEAD = 128
"""Distance in elements between the element that is written and the element whose cache line is prefetched."""

_PREFETCH = "llvm.prefetch.p0i8"
# More lines can be on their way to the second-level cache than to the first.
_FOR_READING = 0
_INTO_L2 = 2
_DATA = 1


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(_: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of ``array[index]``, by LLVM's ``llvm.prefetch``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type = signature.args[0]
        array_value = context.make_array(array_type)(context, builder, arguments[0])
        address = cgutils.get_item_pointer(context, builder, array_type, array_value, [arguments[1]], wraparound=False)
        byte_pointer = ir.IntType(8).as_pointer()
        integer = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, integer, integer, integer])
        function = cgutils.get_or_insert_function(builder.module, function_type, _PREFETCH)
        options = [integer(value) for value in (_FOR_READING, _INTO_L2, _DATA)]
        builder.call(function, [builder.bitcast(address, byte_pointer), *options])
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp), generate


# The loop is bound by memory latency. So each cache line is prefetched, which halves the time, and is fetched once for
# the comparison and the write. Any other store or branch stalls the processor until a line arrives: to keep the
# elements that differ, for example, makes the loop half as slow again.
@compiled  # type: ignore[untyped-decorator]
def _scatter(live: Any, elements: Any, old: Any, new: Any, shift: Any) -> int:
    """Write ``new``, and count the elements that were not ``old``."""
    different = 0
    for i in range(elements.size):
        if i + _AHEAD < elements.size:
            _prefetch(live, np.intp(elements[i + _AHEAD]))
        element = elements[i]
        different += live[element] != (np.uint32(old[i]) << shift)
        live[element] = np.uint32(new[i]) << shift
    return different


@compiled  # type: ignore[untyped-decorator]
def _count_different(live: Any, elements: Any, expected: Any, shift: Any) -> int:
    """Count the elements that are not ``expected``."""
    different = 0
    for i in range(elements.size):
        if i + _AHEAD < elements.size:
            _prefetch(live, np.intp(elements[i + _AHEAD]))
        different += live[elements[i]] != (np.uint32(expected[i]) << shift)
    return different


def scatter_checked(
    live: NDArray[Any], elements: NDArray[Any], old: NDArray[Any], new: NDArray[Any]
) -> tuple[int, int]:
    """Compare ``live[elements]`` with ``old``, write ``new``, and read it back.

    ``live``: uint16 or uint32, flat. ``elements``: uint32 or int64 [n]. ``old`` and ``new``: bit patterns [n] as wide
    as ``live``, or uint16 that ``live`` (uint32) has in its upper half. Returns the number of elements that were not
    ``old`` before, and the number that are not ``new`` afterwards; (0, 0) is success. Where elements were not ``old``,
    ``old`` is written to all of them."""
    shift = np.uint32(8 * (live.dtype.itemsize - new.dtype.itemsize))
    different = int(_scatter(live, elements, old, new, shift))
    if different:
        live[elements] = old.astype(live.dtype) << live.dtype.type(shift)
        return different, 0
    return 0, int(_count_different(live, elements, new, shift))
