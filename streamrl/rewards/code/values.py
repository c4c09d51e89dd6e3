"""Python values as JSON between the judge and the code: plain values by value, everything else by reference.

A message holds a flat table of containers, so that shared and cyclic structures arrive as what they were, and no
nesting exhausts a parser. An *atom* is None, a bool, a str, a float, a small int, or a list whose first item is a tag.
What arrives is not trusted: only values of exact built-in types are made from it, and nothing is imported or called.
"""

from __future__ import annotations

import contextlib
import datetime
import keyword
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

Atom = Any
_LARGEST_PLAIN_INT = 1 << 53
_MUTABLE: dict[type, str] = {list: "list", set: "set", dict: "dict", bytearray: "bytearray", deque: "deque",
            OrderedDict: "ordered", Counter: "counter", defaultdict: "default"}  # fmt: skip
_CONTAINERS: dict[type, str] = {tuple: "tuple", frozenset: "frozenset", **_MUTABLE}
_MAPPINGS = ("dict", "ordered", "counter", "default")

# Types that keep their identity on the way, and exceptions: no function, so that nothing can be called by this.
_KINDS: list[type] = [
    bool,
    bytes,
    bytearray,
    complex,
    dict,
    float,
    frozenset,
    int,
    list,
    object,
    range,
    set,
    str,
    tuple,
]
_TYPES: dict[str, type] = {kind.__name__: kind for kind in (*_KINDS, type, type(None))}


_MALFORMED = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class MalformedValue(ValueError):
    """What the other side sent is no value of this format."""


@contextlib.contextmanager
def well_formed() -> Iterator[None]:
    """What cannot be taken apart in here was made up by the other side: ``MalformedValue``."""
    try:
        yield
    except MalformedValue:
        raise
    except _MALFORMED as error:
        raise MalformedValue(f"a message that cannot be read: {type(error).__name__}: {error}") from error


def is_mutable(value: object) -> bool:
    """Whether a copy of ``value`` can differ from it later on."""
    return type(value) in _MUTABLE


class Encoder:
    """Atoms of one message; ``objects`` is its table. ``export`` gives the atom of what does not travel by value."""

    def __init__(self, export: Callable[[Any], Atom]) -> None:
        self.objects: list[Any] = []
        self.originals: list[Any] = []  # alive as long as the encoder, so that an id stays what it names
        self._export = export
        self._indices: dict[int, int] = {}

    def encode(self, value: Any) -> Atom:
        """The atom of ``value``."""
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if abs(value) < _LARGEST_PLAIN_INT else ["int", hex(value)]
        if kind in _CONTAINERS or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            return self._container(value, _CONTAINERS.get(kind, "named"))
        scalar = _scalar(value)
        return self._export(value) if scalar is None else scalar

    def _container(self, value: Any, tag: str) -> Atom:
        index = self._indices.get(id(value))
        if index is None:
            index = self._indices[id(value)] = len(self.objects)
            self.objects.append(None)
            self.originals.append(value)
            self.objects[index] = [tag, *self._content(value, tag)]
        return ["ref", index]

    def _content(self, value: Any, tag: str) -> list[Any]:
        if tag == "bytearray":
            return [bytes(value).decode("latin-1")]
        if tag in _MAPPINGS:
            return [[[self.encode(key), self.encode(item)] for key, item in value.items()]]
        items = [self.encode(item) for item in value]
        if tag == "deque":
            return [items, value.maxlen]
        return [items, type(value).__name__, list(type(value)._fields)] if tag == "named" else [items]


def _scalar(value: Any) -> Atom:
    """The atom of a value without parts; None for what is none of these."""
    kind: type = type(value)
    if kind is bytes:
        return ["bytes", value.decode("latin-1")]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is range:
        return ["range", *(hex(part) for part in (value.start, value.stop, value.step))]
    if kind is Fraction:
        return ["fraction", hex(value.numerator), hex(value.denominator)]
    if kind is Decimal:
        return ["decimal", str(value)]
    if kind in (datetime.datetime, datetime.date, datetime.time) and getattr(value, "tzinfo", None) is None:
        return [kind.__name__, value.isoformat()]
    if kind is datetime.timedelta:
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if value is Ellipsis:
        return ["ellipsis"]
    if isinstance(value, type) and _TYPES.get(value.__name__) is value:
        return ["type", value.__name__]
    return _as_base(value)


def _as_base(value: Any) -> Atom:
    """A number or string of a subclass (an IntEnum, a library's float) as what it is based on."""
    if isinstance(value, int):
        return ["int", hex(int.__add__(value, 0))]
    if isinstance(value, float):
        return float.__add__(value, 0.0)
    return str.__str__(value) if isinstance(value, str) else None


_SCALAR_MAKERS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": lambda text: text.encode("latin-1"),
    "complex": complex,
    "range": lambda *parts: range(*(int(part, 16) for part in parts)),
    "fraction": lambda *parts: Fraction(*(int(part, 16) for part in parts)),
    "decimal": Decimal,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": datetime.timedelta,
    "ellipsis": lambda: Ellipsis,
    "type": _TYPES.__getitem__,
}
_EMPTY: dict[str, Callable[[], Any]] = {
    "list": list, "set": set, "dict": dict, "bytearray": bytearray, "ordered": OrderedDict, "counter": Counter,
    "default": defaultdict,
}  # fmt: skip


class Decoder:
    """Values from the atoms of one message. ``resolve``: the value of an atom with a tag that is not of this module.

    ``existing``: objects to put the contents into, by index in the table: what the other side changed stays the
    object that it was here.
    """

    def __init__(self, objects: Any, resolve: Callable[[Atom], Any], existing: Mapping[int, Any] | None = None) -> None:
        if not isinstance(objects, list):
            raise MalformedValue("the table of objects is no list")
        self.made: dict[int, Any] = {}
        self._objects = objects
        self._resolve = resolve
        self._existing = existing or {}

    def decode(self, atom: Atom) -> Any:
        """The value of ``atom``. Raises ``MalformedValue``."""
        if not isinstance(atom, list):
            if isinstance(atom, dict):
                raise MalformedValue("an atom is no mapping")
            return atom
        if not atom or not isinstance(atom[0], str):
            raise MalformedValue("an atom without a tag")
        try:
            if atom[0] == "ref":
                return self._object(atom[1])
            maker = _SCALAR_MAKERS.get(atom[0])
            return self._resolve(atom) if maker is None else maker(*atom[1:])
        except MalformedValue:
            raise
        except _MALFORMED as error:
            raise MalformedValue(f"a malformed {atom[0]}: {error}") from error

    def _object(self, index: Any) -> Any:
        if type(index) is not int or not 0 <= index < len(self._objects):
            raise MalformedValue(f"no object {index!r}")
        if index in self.made:
            return self.made[index]
        tag, content, *more = self._objects[index]
        if tag in ("tuple", "frozenset", "named"):
            # Nothing immutable can contain itself but through something mutable, which is made before its parts.
            value = self.made[index] = self._immutable(tag, [self.decode(item) for item in content], more)
            return value
        value = self._existing.get(index)
        if value is None or _MUTABLE.get(type(value)) != tag:
            value = deque(maxlen=more[0]) if tag == "deque" else _EMPTY[tag]()
        self.made[index] = value
        self._fill(value, tag, content)
        return value

    def _immutable(self, tag: str, items: list[Any], more: list[Any]) -> Any:
        if tag != "named":
            return tuple(items) if tag == "tuple" else frozenset(items)
        name, fields = more
        if not all(
            isinstance(word, str) and word.isidentifier() and not keyword.iskeyword(word) for word in [name, *fields]
        ):
            raise MalformedValue("a named tuple with names that are none")
        return namedtuple(name, fields)(*items)

    def _fill(self, value: Any, tag: str, content: Any) -> None:
        if tag == "bytearray":
            value[:] = content.encode("latin-1")
        elif tag in _MAPPINGS:
            pairs = [(self.decode(key), self.decode(item)) for key, item in content]
            value.clear()
            for key, item in pairs:
                value[key] = item
        else:
            items = [self.decode(item) for item in content]
            value.clear()
            value.update(items) if tag == "set" else value.extend(items)
