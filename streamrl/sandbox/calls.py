"""Calls of the code, which lives in a process of its own, by the process that runs the test.

The test gets plain values, of exact built-in types, and compares them where the code can neither see what is expected
nor touch what decides. What is not plain stays with the code: the test gets a ``Remote``, which has no operator, no
conversion and no order, and equals nothing. Only the standard library: the zygote loads it.
"""

from __future__ import annotations

import builtins
import importlib
import io
import json
from collections.abc import Iterable
from typing import IO, Any

from streamrl.sandbox.names import MODULES, TextOfTest, names_a_class
from streamrl.sandbox.values import MALFORMED, PLAIN_ATTRIBUTES, decode, encode

_LARGEST_MESSAGE = 16 << 20


class CodeFailed(BaseException):
    """The code's process ended, or sent an invalid answer. No test catches it by ``except Exception``."""


class RunInside(BaseException):
    """The test hands the code what is not plain: it can only run where the code does."""


class Channel:
    """Messages of JSON, a line each, over the socket ``fd``."""

    def __init__(self, fd: int) -> None:
        self._incoming: IO[bytes] = io.BufferedReader(io.FileIO(fd, "r", closefd=False))
        self._outgoing: IO[bytes] = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))

    def send(self, message: dict[str, Any]) -> None:
        """Raises ``CodeFailed`` where nobody is at the other end."""
        try:
            self._outgoing.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            self._outgoing.flush()
        except OSError as error:
            raise CodeFailed("the code ended while it was tested") from error

    def receive(self) -> dict[str, Any]:
        """The next one. Raises ``CodeFailed``."""
        try:
            line = self._incoming.readline(_LARGEST_MESSAGE)
            if not line.endswith(b"\n"):
                raise CodeFailed("the code ended while it was tested" if len(line) < _LARGEST_MESSAGE else "too long")
            message = json.loads(line)
        except OSError as error:
            raise CodeFailed("the code ended while it was tested") from error
        except MALFORMED as error:
            raise CodeFailed(f"an answer that is no JSON: {error}") from error
        if not isinstance(message, dict):
            raise CodeFailed("an answer that is no mapping")
        return message


class Code:
    """The code, for the process of the test."""

    def __init__(self, channel: Channel) -> None:
        self.raised: BaseException | None = None
        """The last exception of the code's."""
        self.must_run_inside = False
        """Whether the test handed over what is not plain, even where it caught ``RunInside``."""
        self._channel = channel

    def names(self, wanted: Iterable[str], entry_point: str, text: TextOfTest) -> dict[str, Any]:
        """What the code defines, of the names that are ``wanted``. Built-in names stay the test's own, except
        ``entry_point``; likewise names for which ``text.own_names`` returns the test's own object."""
        self._channel.send({"names": list(wanted)})
        found: dict[str, Any] = {}
        defined: dict[str, Any] = {}
        try:
            for name, data in self._channel.receive()["names"].items():
                # ``__builtins__`` too: the code can write any message.
                if name.startswith("__") or (hasattr(builtins, name) and name != entry_point):
                    continue
                tag, module = next(iter(data.items())) if isinstance(data, dict) else ("", "")
                if tag not in ("module", "member"):
                    defined[name] = decode(data, self._remote)
                elif module in MODULES and (tag == "member" or module == name):
                    # Of another module it is left out: the test means the code's object, and gets a NameError.
                    value = importlib.import_module(module)
                    found[name] = value if tag == "module" else getattr(value, name)
        except MALFORMED as error:
            raise CodeFailed(f"names that cannot be read: {error}") from error
        for name, value in defined.items():
            if isinstance(value, Remote) and names_a_class(name):
                value.streamrl_is_class = True
        return found | defined | text.own_names(entry_point, defined)

    def ask(self, what: str, remote: Remote, /, *arguments: Any, **named: Any) -> Any:
        """What a call ("call"), an attribute ("get"), "iter" or "next" of it gives. Arguments that the code changed
        are changed here."""
        given = encode([list(arguments), named], self._handle)
        self._channel.send({"do": what, "of": remote.streamrl_handle, "with": given})
        return self._answer([*arguments, *named.values()], ending=what == "next")

    def run_inside(self, setup: str, test: str, nonce: str) -> bool:
        """Run the test in the process of the code. Raises what it raises there, by what that process says."""
        self._channel.send({"setup": setup, "test": test, "nonce": nonce})
        return bool(self._answer([]) == nonce)

    def _answer(self, given: list[Any], *, ending: bool = False) -> Any:
        answer = self._channel.receive()
        try:
            if "after" in answer:
                arguments, named = decode(answer["after"], self._remote)
                _change(given, [*arguments, *named.values()])
            if "raised" not in answer:
                return decode(answer["value"], self._remote)
            self.raised = _exception(*decode(answer["raised"], self._remote), ending=ending)
        except MALFORMED as error:
            raise CodeFailed(f"an answer that cannot be read: {type(error).__name__}: {error}") from error
        raise self.raised

    def _handle(self, value: Any) -> dict[str, int]:
        if type(value) is Remote:
            return {"object": value.streamrl_handle}
        self.must_run_inside = True
        raise RunInside(f"a {type(value).__name__} of the test goes to the code")

    def _remote(self, tag: str, handle: Any) -> Remote:
        if tag != "object" or type(handle) is not int:
            raise ValueError(f"no tag {tag!r} of {handle!r}")
        return Remote(self, handle)


class Remote:
    """A function or an object of the code's. ``streamrl_is_class``: the test names it as a class is named;
    ``streamrl_is_made``: the test constructed it from such a class, so any attribute access is forwarded."""

    __slots__ = ("streamrl_code", "streamrl_handle", "streamrl_is_class", "streamrl_is_made")

    def __init__(self, code: Code, handle: int) -> None:
        self.streamrl_code = code
        self.streamrl_handle = handle
        self.streamrl_is_class = self.streamrl_is_made = False

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        result = self.streamrl_code.ask("call", self, *arguments, **named)
        if self.streamrl_is_class and type(result) is Remote:
            result.streamrl_is_made = True
        return result

    def __getattribute__(self, name: str) -> Any:  # those of any object too: ``f(x).__eq__(expected)``
        if name.startswith("streamrl_") or name == "__class__":
            return object.__getattribute__(self, name)
        if name in PLAIN_ATTRIBUTES and not self.streamrl_is_made:
            # ``f(x).startswith(expected)`` is for text to answer, not for an object.
            raise AttributeError(f"the code gave an object where a plain value has {name!r}")
        return self.streamrl_code.ask("get", self, name)

    def __iter__(self) -> Any:
        return self.streamrl_code.ask("iter", self)

    def __next__(self) -> Any:
        return self.streamrl_code.ask("next", self)


def _change(values: list[Any], others: list[Any]) -> None:
    """Give each of the containers ``values`` the content of its counterpart."""
    for value, other in zip(values, others, strict=True):
        if type(value) is not type(other):
            continue
        if isinstance(value, list | bytearray):
            value[:] = other
        elif isinstance(value, dict | set):
            value.clear()
            value.update(other)


def _exception(kinds: list[str], arguments: Any, *, ending: bool) -> BaseException:
    """An exception of the first of ``kinds`` that is built in. StopIteration and StopAsyncIteration are passed on only
    for ``next`` (``ending``): anywhere else they would end ``all(map(test, values))`` early, and the test would pass.
    """
    for name in kinds:
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            continue
        if issubclass(kind, StopIteration | StopAsyncIteration) and not ending:
            return RuntimeError(f"the code raised {name}")
        try:
            return kind(*arguments)
        except TypeError:  # one that asks for other arguments, as UnicodeDecodeError
            continue
    return RuntimeError("the code raised what is no exception")
