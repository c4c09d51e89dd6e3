"""Sixty-four elements compared at once, as numba's compiler is not brought to do by a loop: one bit of a word for each.

LLVM turns a comparison of vectors whose result is read as an integer into mask instructions (AVX-512), into packed
comparisons and ``movmsk`` (AVX2), or into what else the processor has.
"""

# Bodies are LLVM's builder calls, which have no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,no-any-unimported"

from __future__ import annotations

import platform

import numba  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]

LANES = 64
_ONE = np.uint64(1)


@intrinsic
def differing(typing_context, old, now, start):
    """``differing(old, now, start)``: bit i of the uint64 says whether elements ``start + i`` of two contiguous arrays
    of one type differ. 64 elements must be there."""

    def build(context, builder, signature, arguments):
        old_type, _, _ = signature.args
        sides = [_load(context, builder, old_type, array, arguments[2]) for array in arguments[:2]]
        return builder.bitcast(builder.icmp_unsigned("!=", *sides), ir.IntType(LANES))

    return types.uint64(old, now, start), build


@intrinsic
def within(typing_context, elements, start, lowest, span):
    """``within(elements, start, lowest, span)``: bit i of the uint64 says whether byte ``start + i`` of an array lies 0
    to ``span`` above ``lowest`` (modulo 256). 64 elements must be there."""

    def build(context, builder, signature, arguments):
        values = _load(context, builder, signature.args[0], arguments[0], arguments[1])
        above = builder.sub(values, _splat(builder, arguments[2]))
        inside = builder.icmp_unsigned("<=", above, _splat(builder, arguments[3]))
        return builder.bitcast(inside, ir.IntType(LANES))

    return types.uint64(elements, start, types.uint8, types.uint8), build


@intrinsic
def ones(typing_context, word):
    """``ones(word)``: how many bits of a uint64 are set."""

    def build(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), build


@intrinsic
def lowest_one(typing_context, word):
    """``lowest_one(word)``: the place of the lowest set bit of a uint64; 64 where there is none."""

    def build(context, builder, signature, arguments):
        return builder.cttz(arguments[0], cgutils.false_bit)

    return types.int64(types.uint64), build


@intrinsic
def _deposit(typing_context, bits, mask):
    """The bits of the first word, lowest first, at the places that are set in the second: one instruction of BMI2."""

    def build(context, builder, signature, arguments):
        word = ir.IntType(64)
        name = "llvm.x86.bmi.pdep.64"
        return builder.call(builder.module.declare_intrinsic(name, (), ir.FunctionType(word, [word, word])), arguments)

    return types.uint64(types.uint64, types.uint64), build


@numba.njit(nogil=True, cache=True)
def _place_by_deposit(word, rank):
    return lowest_one(_deposit(_ONE << np.uint64(rank), word))


@numba.njit(nogil=True, cache=True)
def _place_by_steps(word, rank):
    for _ in range(rank):
        word &= word - _ONE
    return lowest_one(word)


_has_deposit = platform.machine() in ("x86_64", "AMD64") and get_host_cpu_features().get("bmi2", False)
place_of = _place_by_deposit if _has_deposit else _place_by_steps
"""``place_of(word, rank)``: the place of set bit number ``rank`` (int64, from 0) of a uint64, which has so many."""


def _load(context, builder, array_type, array, start):
    held = context.make_array(array_type)(context, builder, array)
    element = context.get_data_type(array_type.dtype)
    first = builder.gep(held.data, [start])
    vector = builder.bitcast(first, ir.VectorType(element, LANES).as_pointer())
    return builder.load(vector, align=array_type.dtype.bitwidth // 8)


def _splat(builder, byte):
    vector = ir.VectorType(byte.type, LANES)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), byte, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), zeros)
