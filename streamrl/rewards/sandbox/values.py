"""Plain Python values as JSON data, from the code's process to the one that compares. Only the standard library. Input
is not trusted: only values of exact built-in types are made of it, and few enough members of sets and mappings that no
choice of members makes them slow (numbers with equal hashes)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sized
from typing import Any

MOST_MEMBERS = 10_000
MALFORMED = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What ``decode`` raises for data that ``encode`` does not make."""

_LARGEST_PLAIN_INT = 1 << 4096  # the JSON module reads no more than 4,300 digits

# Each type with what takes a value apart, and what makes one of the parts, which are plain themselves.
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
    """Stands for an object that is no plain value. It equals nothing, and has no operator and no conversion."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False

    def __bool__(self) -> bool:
        raise TypeError("the code gave an object that is no plain value")


def limited(items: Any) -> Any:
    """``items``. Raises ``ValueError`` where a set or mapping of them would have too many members."""
    if isinstance(items, Sized) and len(items) > MOST_MEMBERS:
        raise ValueError(f"a set or a mapping of more than {MOST_MEMBERS:,} members")
    return items


def encode(value: Any) -> Any:
    """JSON data of ``value``. An iterator is exhausted; other objects are only named by their type."""
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
    """The value that ``encode`` was given. Raises one of ``MALFORMED``."""
    if type(data) is list:
        return [decode(item) for item in data]
    if type(data) is not dict:
        return data
    ((name, content),) = data.items()
    return _MAKERS[name](*[decode(part) for part in content])


def same_result(given: Any, expected: Any, tolerance: float | None = None) -> bool:
    """Return whether a call gave what a dataset expects, but for what JSON cannot say: a tuple is a list, the keys of a
    mapping are strings. ``tolerance``: numbers may differ by that much, absolutely or relative to the expected one."""
    if isinstance(expected, list | tuple):
        if not isinstance(given, list | tuple) or len(given) != len(expected):
            return False
        return all(same_result(ours, theirs, tolerance) for ours, theirs in zip(given, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(given, dict) or len(given) != len(expected):
            return False
        ours = {_key(key): value for key, value in given.items()}
        return all(
            _key(key) in ours and same_result(ours[_key(key)], value, tolerance) for key, value in expected.items()
        )
    if isinstance(given, float) and isinstance(expected, float) and math.isnan(expected):
        return math.isnan(given)
    return bool(given == expected) or _both_near(given, expected, tolerance)


def near(given: float, expected: float, tolerance: float) -> bool:
    """Return whether two numbers differ by at most ``tolerance``. Nothing is near infinity."""
    finite = math.isfinite(given) and math.isfinite(expected)
    return finite and abs(given - expected) <= tolerance * max(1.0, abs(expected))


def _both_near(given: Any, expected: Any, tolerance: float | None) -> bool:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (given, expected))
    try:
        return tolerance is not None and numbers and near(given, expected, tolerance)
    except OverflowError:  # an int beyond all floats
        return False


def _key(key: Any) -> Any:
    """Return the form of a mapping's key in JSON."""
    return json.dumps(key) if key is None or isinstance(key, int | float) else key
