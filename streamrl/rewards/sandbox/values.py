"""Conversion of plain Python values to JSON data and back, and comparison of results. Only the standard library.

``encode`` runs in the code's process in the jail, ``decode`` and the comparison in the process of the reward. The data
is not trusted: ``decode`` makes only values of exact built-in types, and limits the members of sets and mappings, so
that members with equal hashes cannot make it slow."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sized
from typing import Any

MOST_MEMBERS = 10_000
MALFORMED = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What ``decode`` raises for data that ``encode`` does not make."""

_LARGEST_PLAIN_INT = 1 << 4096  # the JSON module reads no more than 4,300 digits

# Type -> function that splits a value into parts, and function that makes a value from its parts.
_PARTS: dict[type, tuple[Callable[[Any], list[Any]], Callable[..., Any]]] = {
    int: (lambda value: [hex(value)], lambda text: int(text, 16)),
    bytes: (lambda value: [value.decode("latin-1")], lambda text: text.encode("latin-1")),
    complex: (lambda value: [value.real, value.imag], complex),
    range: (lambda value: [value.start, value.stop, value.step], range),
    tuple: (list, lambda *items: items),
    set: (list, lambda *items: set(limited(items))),
    frozenset: (list, lambda *items: frozenset(limited(items))),
    dict: (lambda value: [[key, item] for key, item in value.items()], lambda *pairs: dict(limited(pairs))),
}
_MAKERS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: make for kind, (_, make) in _PARTS.items()},
    "iterator": lambda *items: iter(items),
    "object": lambda _: Opaque(),
}
# Instances of subclasses (Counter, IntEnum) are sent as their base type.
_BASES: dict[type, Callable[[Any], Any]] = {
    int: int, float: float, str: str.__str__, dict: dict, list: list, tuple: tuple, set: set, frozenset: frozenset,
}  # fmt: skip


class Opaque:
    """Placeholder for an object that is no plain value. It equals nothing, and has no operator and no conversion."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False

    def __bool__(self) -> bool:
        raise TypeError("the code gave an object that is no plain value")


def limited(items: Any) -> Any:
    """Return ``items``. Raises ``ValueError`` where a set or mapping of them would have too many members."""
    if isinstance(items, Sized) and len(items) > MOST_MEMBERS:
        raise ValueError(f"a set or a mapping of more than {MOST_MEMBERS:,} members")
    return items


def encode(value: Any) -> Any:
    """JSON data of ``value``. An iterator is consumed; of an object that is no plain value only the type's name is
    kept."""
    kind = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and abs(value) < _LARGEST_PLAIN_INT):
        return value
    if kind is list:
        return [encode(item) for item in value]
    if kind in _PARTS:
        return {kind.__name__: [encode(part) for part in _PARTS[kind][0](value)]}
    for base, plain in _BASES.items():
        if isinstance(value, base):
            return encode(plain(value))
    if isinstance(value, Iterator):
        return {"iterator": [encode(item) for item in value]}
    return {"object": [kind.__name__]}


def decode(data: Any) -> Any:
    """The value whose JSON data ``encode`` returned. Raises one of ``MALFORMED``."""
    if type(data) is list:
        return [decode(item) for item in data]
    if type(data) is not dict:
        return data
    ((name, content),) = data.items()
    return _MAKERS[name](*[decode(part) for part in content])


def same_result(result: Any, expected: Any, tolerance: float | None) -> bool:
    """Return whether the result of a call is the one that a dataset expects, compared as JSON: a tuple equals a list,
    and keys of mappings are strings. ``tolerance``: allowed difference of numbers, absolute or relative to the expected
    number."""
    if isinstance(expected, list | tuple):
        if not isinstance(result, list | tuple) or len(result) != len(expected):
            return False
        pairs = zip(result, expected, strict=True)
        return all(same_result(item, expected_item, tolerance) for item, expected_item in pairs)
    if isinstance(expected, dict):
        if not isinstance(result, dict) or len(result) != len(expected):
            return False
        by_key = {_key(key): value for key, value in result.items()}
        return all(
            _key(key) in by_key and same_result(by_key[_key(key)], value, tolerance) for key, value in expected.items()
        )
    if isinstance(result, float) and isinstance(expected, float) and math.isnan(expected):
        return math.isnan(result)
    return bool(result == expected) or _near_numbers(result, expected, tolerance)


def near(number: float, expected: float, tolerance: float) -> bool:
    """Return whether two numbers differ by at most ``tolerance``. No number is near infinity."""
    finite = math.isfinite(number) and math.isfinite(expected)
    return finite and abs(number - expected) <= tolerance * max(1.0, abs(expected))


def _near_numbers(result: Any, expected: Any, tolerance: float | None) -> bool:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (result, expected))
    try:
        return tolerance is not None and numbers and near(result, expected, tolerance)
    except OverflowError:  # an int that is too large for a float
        return False


def _key(key: Any) -> Any:
    """Return the key of a mapping as JSON has it."""
    return json.dumps(key) if key is None or isinstance(key, int | float) else key
