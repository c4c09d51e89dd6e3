"""Plain Python values as JSON data, between the process of a test and that of the code. Only the standard library.

What arrives is not trusted: only values of exact built-in types, and of a few of the standard library, are made of it.
"""

from __future__ import annotations

from collections import deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

_LARGEST_PLAIN_INT = 1 << 4096  # the JSON module reads no more than 4,300 digits

# Each type with what takes a value apart, and what makes one of the parts, which are plain themselves.
_PARTS: dict[type, tuple[Callable[[Any], list[Any]], Callable[..., Any]]] = {
    int: (lambda value: [hex(value)], lambda text: int(text, 16)),
    bytes: (lambda value: [value.decode("latin-1")], lambda text: text.encode("latin-1")),
    bytearray: (lambda value: [value.decode("latin-1")], lambda text: bytearray(text.encode("latin-1"))),
    complex: (lambda value: [value.real, value.imag], complex),
    range: (lambda value: [value.start, value.stop, value.step], range),
    Decimal: (lambda value: [str(value)], Decimal),
    Fraction: (lambda value: [value.numerator, value.denominator], Fraction),
    date: (lambda value: [value.isoformat()], date.fromisoformat),
    time: (lambda value: [value.isoformat()], time.fromisoformat),
    datetime: (lambda value: [value.isoformat()], datetime.fromisoformat),
    timedelta: (lambda value: [value.days, value.seconds, value.microseconds], timedelta),
    dict: (lambda value: [[key, item] for key, item in value.items()], lambda *pairs: dict(pairs)),
    tuple: (list, lambda *items: items),
    set: (list, lambda *items: set(items)),
    frozenset: (list, lambda *items: frozenset(items)),
    deque: (lambda value: [list(value), value.maxlen], deque),
}
PLAIN_ATTRIBUTES = frozenset(name for kind in (*_PARTS, str, float, list) for name in dir(kind))
"""Names of attributes that a plain value can have."""


def _named(name: str, fields: list[str], *items: Any) -> Any:
    """A named tuple. ``namedtuple`` refuses what is no name."""
    return tuple(items) if not PLAIN_ATTRIBUTES.isdisjoint(fields) else namedtuple(name, fields)(*items)


_MAKERS = {kind.__name__: make for kind, (_, make) in _PARTS.items()} | {"named": _named}
MALFORMED = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What ``decode`` raises for data that ``encode`` does not make."""


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """JSON data of ``value``. ``other`` gives that of what is of none of the types."""
    kind = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and abs(value) < _LARGEST_PLAIN_INT):
        return value
    if kind is list:
        return [encode(item, other) for item in value]
    if kind in _PARTS:
        return {kind.__name__: [encode(part, other) for part in _PARTS[kind][0](value)]}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"named": [kind.__name__, list(kind._fields), *(encode(item, other) for item in value)]}
    return other(value)


def decode(data: Any, other: Callable[[str, Any], Any]) -> Any:
    """The value. ``other`` gives that of a mapping with another key than the name of a type, by its key and content."""
    if type(data) is list:
        return [decode(item, other) for item in data]
    if type(data) is not dict:
        return data
    ((name, content),) = data.items()
    if name not in _MAKERS:
        return other(name, content)
    return _MAKERS[name](*[decode(part, other) for part in content])
