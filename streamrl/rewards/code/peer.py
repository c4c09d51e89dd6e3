"""Calls between the judge's process and the code's: each holds the other's objects as proxies.

The test runs in the judge's process and the code in its own, so that the code can neither see what is expected nor
touch what decides. What the code answers is not trusted:

- plain values arrive by value, of exact built-in types: nothing that the code defines compares them;
- an object of the code's is a ``Proxy``, which never equals, and cannot be ordered against, anything that is not one;
- the code may call functions that the test passed to it and use public attributes of objects of the test's own
  classes, and nothing else.

Only the standard library: the zygote loads it.
"""

from __future__ import annotations

import builtins
import importlib
import json
import operator
import os
import struct
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from streamrl.rewards.code.names import MODULES, genuine_member
from streamrl.rewards.code.values import Atom, Decoder, Encoder, MalformedValue, is_mutable, well_formed

TEST_MODULE = "test"
OwnNames = Callable[[Iterable[str]], Mapping[str, Any]]
_LARGEST_FRAME = 16 << 20
_HEADER = struct.Struct("<I")

_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift"]
_UNARY = ["neg", "pos", "abs", "invert"]
_CONVERSIONS: dict[str, Callable[..., Any]] = {
    "index": operator.index, "str": str, "repr": repr, "bool": bool, "int": int, "float": float, "len": len,
    "hash": hash,
}  # fmt: skip
_ORDERS = ["lt", "le", "gt", "ge"]


def _call(function: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    return function(*arguments, **named)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _call, "getattr": getattr, "setattr": setattr, "iter": iter, "next": next, "isinstance": isinstance,
    "issubclass": issubclass, "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem,
    "eq": operator.eq, "format": format,
    **{name: getattr(operator, name) for name in (*_BINARY, *_UNARY, *_ORDERS)},
    **_CONVERSIONS,
}  # fmt: skip


class ChannelEnded(Exception):
    """The process at the other end is gone."""


class CodeFailed(Exception):
    """The code ended or raised before it could be called; or answered with nonsense."""


class Peer:
    """One end of the channel ``fd``. Objects that were given out are kept for as long as the process lives."""

    def __init__(self, fd: int, *, is_judge: bool) -> None:
        self.is_judge = is_judge
        self._fd = fd
        self._given: list[Any] = []
        self._handles: dict[int, int] = {}
        self._received: dict[int, Any] = {}
        self.raised: Exception | None = None
        """The last exception that came from the other side."""

    # -- calls ------------------------------------------------------------------------------------------------------

    def request(self, operation: str, *arguments: Any) -> Any:
        """What ``operation`` gives over there. Arguments that it changed are changed here."""
        encoder = Encoder(self._export)
        atoms = [encoder.encode(argument) for argument in arguments]
        self._send({"do": operation, "arguments": atoms, "objects": encoder.objects})
        while True:
            frame = self._receive()
            if "do" not in frame:
                with well_formed():
                    value, raised = self._result(frame, encoder)
                if raised is not None:
                    self.raised = raised
                    raise raised
                return value
            self._answer(frame)

    def serve(self) -> None:
        """Answer until the other side is gone (``ChannelEnded``)."""
        while True:
            self._answer(self._receive())

    def _result(self, frame: dict[str, Any], asked: Encoder) -> tuple[Any, Exception | None]:
        existing = {}
        for index, atom in frame.get("after", ()):
            if type(index) is int and 0 <= index < len(asked.originals) and isinstance(atom, list) and len(atom) == 2:
                existing[atom[1]] = asked.originals[index]
        decoder = Decoder(frame.get("objects"), self._resolve, existing)
        for index in existing:
            decoder.decode(["ref", index])
        if "raised" in frame:
            return None, self._exception(decoder, frame["raised"])
        return decoder.decode(frame.get("value")), None

    def _answer(self, frame: dict[str, Any]) -> None:
        encoder = Encoder(self._export)
        decoder = Decoder(frame.get("objects"), self._resolve)
        reply: dict[str, Any] = {}
        try:
            arguments = [decoder.decode(atom) for atom in frame["arguments"]]
            self._check_allowed(frame["do"], arguments)
            reply["value"] = encoder.encode(_OPERATIONS[frame["do"]](*arguments))
        except ChannelEnded:
            raise
        except Exception as error:  # noqa: BLE001 - the caller's to see
            reply["raised"] = _described(encoder, error)
        changed = [(index, value) for index, value in decoder.made.items() if is_mutable(value)]
        with well_formed():
            reply["after"] = [[index, encoder.encode(value)] for index, value in changed]
        reply["objects"] = encoder.objects
        self._send(reply)

    def _check_allowed(self, operation: str, arguments: list[Any]) -> None:
        """What the code may do to the judge's objects. They are of the kinds that ``_export`` lets out."""
        if not self.is_judge:
            return
        target = arguments[0]
        # Only what the test passed: of anything else (a type, say) the code could make what equals everything.
        given = any(target is one for one in self._given)
        if operation in ("getattr", "setattr"):
            allowed = _is_of_test(target) and isinstance(arguments[1], str) and not arguments[1].startswith("_")
        else:
            allowed = operation in ("call", "iter", "next", "len", "getitem", "str", "repr", "bool")
            allowed = allowed and (operation != "call" or callable(target))
        if not (allowed and given):
            raise TypeError(f"the code may not use {operation} on {type(target).__name__} of the test")

    # -- objects ----------------------------------------------------------------------------------------------------

    def _export(self, value: Any) -> Atom:
        kind = type(value)
        if kind is Proxy and value.streamrl_peer is self:
            return ["mine", value.streamrl_handle]
        if isinstance(value, type) and "streamrl_handle" in vars(value):  # the stub of an exception of the code's
            return ["mine", vars(value)["streamrl_handle"]]
        if self.is_judge and not _may_leave(value):
            raise TypeError(f"a {kind.__name__} of the test cannot be passed to the code")
        handle = self._handles.get(id(value))
        if handle is None:
            handle = self._handles[id(value)] = len(self._given)
            self._given.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", handle, value.__name__, [base.__name__ for base in value.__mro__]]
        return ["remote", handle]

    def _resolve(self, atom: Atom) -> Any:
        tag, handle, *more = atom
        if type(handle) is not int or handle < 0:
            raise MalformedValue(f"no handle {handle!r}")
        if tag == "mine":
            return self._given[handle]
        if handle not in self._received:
            if tag == "remote":
                self._received[handle] = Proxy(self, handle)
            elif tag == "exception":
                self._received[handle] = _exception_stub(handle, *more)
            else:
                raise MalformedValue(f"no tag {tag!r}")
        return self._received[handle]

    def _exception(self, decoder: Decoder, raised: Any) -> Exception:
        kind, names, arguments = raised
        values = decoder.decode(arguments)
        made = decoder.decode(kind) if isinstance(kind, list) and kind[:1] == ["exception"] else _builtin_error(names)
        if not isinstance(values, tuple) or not (isinstance(made, type) and issubclass(made, Exception)):
            raise MalformedValue("an exception that is none")
        try:
            return made(*values)
        except TypeError:  # one that asks for other arguments, as UnicodeDecodeError
            return CodeFailed(made.__name__)

    # -- names ------------------------------------------------------------------------------------------------------

    def offer_names(self, module: Mapping[str, Any]) -> None:
        """Tell the judge what the code defines."""
        encoder = Encoder(self._export)
        names: dict[str, Atom] = {}
        for name, value in module.items():
            if name.startswith("__"):
                continue
            if isinstance(value, types.ModuleType):
                names[name] = ["module", value.__name__]
            else:
                genuine = genuine_member(name, value)
                names[name] = encoder.encode(value) if genuine is None else ["member", genuine, name]
        self._send({"names": names, "objects": encoder.objects})

    def receive_names(self, entry_point: str, own: OwnNames = lambda defined: {}) -> dict[str, Any]:
        """What the test can use of the code's. Built-in names stay the judge's own, but for ``entry_point``; ``own``
        gives what else does, of the names that the code has defined itself."""
        frame = self._receive()
        names = frame.get("names")
        if not isinstance(names, dict):
            raise CodeFailed("the code ended before it could be called")
        decoder = Decoder(frame.get("objects"), self._resolve)
        found: dict[str, Any] = {}
        defined: dict[str, Any] = {}
        with well_formed():
            for name, atom in names.items():
                # ``__builtins__`` too: the code can write any frame to the channel.
                built_in = hasattr(builtins, name) and name != entry_point
                if built_in or name.startswith("__") or not name.isidentifier():
                    continue
                tag = atom[0] if isinstance(atom, list) and atom else None
                if tag == "module":
                    # Under another name it is left out: the test means the code's object, and gets a NameError.
                    if name == atom[1] and name in MODULES:
                        found[name] = importlib.import_module(name)
                elif tag == "member":
                    if atom[1] in MODULES and atom[2] == name:
                        found[name] = getattr(importlib.import_module(atom[1]), name)
                else:
                    defined[name] = decoder.decode(atom)
        return found | defined | dict(own(defined))

    # -- frames -----------------------------------------------------------------------------------------------------

    def _send(self, frame: dict[str, Any]) -> None:
        content = json.dumps(frame, separators=(",", ":")).encode()
        view = memoryview(_HEADER.pack(len(content)) + content)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise ChannelEnded(str(error)) from error

    def _receive(self) -> dict[str, Any]:
        (size,) = _HEADER.unpack(self._read(_HEADER.size))
        if size > _LARGEST_FRAME:
            raise CodeFailed(f"a message of {size} bytes: at most {_LARGEST_FRAME}")
        with well_formed():
            frame = json.loads(self._read(size))
        if not isinstance(frame, dict):
            raise MalformedValue("a message that is no mapping")
        return frame

    def _read(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            try:
                part = os.read(self._fd, min(size - len(content), 1 << 20))
            except OSError as error:
                raise ChannelEnded(str(error)) from error
            if not part:
                raise ChannelEnded("the other process is gone")
            content += part
        return bytes(content)


class Proxy:
    """An object of the other process."""

    __slots__ = ("streamrl_handle", "streamrl_peer")

    def __init__(self, peer: Peer, handle: int) -> None:
        object.__setattr__(self, "streamrl_peer", peer)
        object.__setattr__(self, "streamrl_handle", handle)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.streamrl_peer.request("call", self, list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        return self.streamrl_peer.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.streamrl_peer.request("setattr", self, name, value)

    def __eq__(self, other: object) -> bool:
        if self is other or type(other) is not Proxy or not self.streamrl_peer.is_judge:
            return self is other
        return bool(self.streamrl_peer.request("eq", self, other))

    def __instancecheck__(self, instance: object) -> bool:
        return type(instance) is Proxy and self.streamrl_peer.request("isinstance", instance, self) is True

    def __subclasscheck__(self, other: object) -> bool:
        return isinstance(other, Proxy) and self.streamrl_peer.request("issubclass", other, self) is True

    def __contains__(self, item: object) -> bool:
        return any(found is item or found == item for found in iter(self))

    def __iter__(self) -> Any:
        return self.streamrl_peer.request("iter", self)

    def __next__(self) -> Any:
        return self.streamrl_peer.request("next", self)

    def __getitem__(self, key: Any) -> Any:
        return self.streamrl_peer.request("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.streamrl_peer.request("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self.streamrl_peer.request("delitem", self, key)

    def __format__(self, specification: str) -> Any:
        return self.streamrl_peer.request("format", self, specification)


def _converted(operation: str) -> Callable[[Proxy], Any]:
    return lambda self: self.streamrl_peer.request(operation, self)


def _computed(operation: str, *, swapped: bool = False) -> Callable[..., Any]:
    def method(self: Proxy, *others: Any) -> Any:
        arguments = (*others, self) if swapped else (self, *others)
        result = self.streamrl_peer.request(operation, *arguments)
        if type(result) is not Proxy and not all(type(other) is Proxy for other in others or (None,)):
            # abs(f(x) - expected) < 1e-6 with an object that is 0 less anything.
            raise TypeError(f"{operation} of an object of the code's gave a plain value, which cannot be trusted")
        return result

    return method


def _ordered(operation: str) -> Callable[[Proxy, object], Any]:
    def method(self: Proxy, other: object) -> Any:
        # Against a plain value the code's own class would decide.
        return self.streamrl_peer.request(operation, self, other) if type(other) is Proxy else NotImplemented

    return method


for _name in _BINARY:
    setattr(Proxy, f"__{_name.rstrip('_')}__", _computed(_name))
    setattr(Proxy, f"__r{_name.rstrip('_')}__", _computed(_name, swapped=True))
for _name in _UNARY:
    setattr(Proxy, f"__{_name}__", _computed(_name))
for _name in _CONVERSIONS:
    setattr(Proxy, f"__{_name}__", _converted(_name))
for _name in _ORDERS:
    setattr(Proxy, f"__{_name}__", _ordered(_name))


def _is_of_test(value: object) -> bool:
    return type(value).__module__ == TEST_MODULE


def _may_leave(value: Any) -> bool:
    """What the test may pass to the code besides plain values: functions, iterators, objects of its own classes."""
    if isinstance(value, type):
        return value.__module__ in (TEST_MODULE, "builtins")
    kinds = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.GeneratorType)
    return isinstance(value, kinds) or _is_of_test(value) or type(value).__module__ in ("functools", "operator")


def _exception_stub(handle: int, name: Any, bases: Any) -> type[Exception]:
    """A class of the judge's own that stands for an exception class of the code's."""
    return type(str(name), (_builtin_error(bases),), {"streamrl_handle": handle, "__module__": "solution"})


def _builtin_error(names: Any) -> type[Exception]:
    """The first of ``names`` that is a built-in exception. What ends interpreters or generators is none of them."""
    for name in names:
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind
    return CodeFailed


def _described(encoder: Encoder, error: Exception) -> list[Any]:
    """Class, built-in bases and arguments of an exception."""
    kind = type(error)
    own = kind.__module__ != "builtins"
    try:
        values = encoder.encode(tuple(error.args))
    except Exception:  # noqa: BLE001 - arguments that cannot travel, as text
        values = encoder.encode((str(error),))
    try:
        exported = encoder._export(kind) if own else None
    except TypeError:  # a class of ours: its built-in bases tell enough
        exported = None
    return [exported, [base.__name__ for base in kind.__mro__], values]
