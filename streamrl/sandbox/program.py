"""What the jailed process does: run the code as a program, or load it and answer calls. Only the standard library."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from streamrl.sandbox.calls import Channel, CodeFailed
from streamrl.sandbox.names import genuine_member
from streamrl.sandbox.values import decode, encode

_FILE = "solution.py"
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, /, *arguments, **named: function(*arguments, **named),
    "get": getattr,
    "iter": iter,
    "next": next,
}
# Instances of subclasses (Counter, IntEnum) are sent as their base type.
_BASES: dict[type, Callable[[Any], Any]] = {
    int: int, float: float, str: str.__str__, dict: dict, list: list, tuple: tuple, set: set, frozenset: frozenset,
}  # fmt: skip


def as_program(source_fd: int) -> Callable[[], int]:
    """What runs the code as ``python solution.py`` would, and gives its exit code."""
    source = _prepare(source_fd)
    return lambda: _ended(lambda: _execute(source, "__main__"))


def as_module(source_fd: int, channel_fd: int) -> Callable[[], int]:
    """What loads the code as a module and answers the calls of the judge until it is done."""
    source = _prepare(source_fd)

    def answer() -> None:
        # Its own __main__ part must not run: the judge calls what it needs.
        module = _execute(source, "solution")
        with contextlib.suppress(CodeFailed):
            _Answers(vars(module)).serve(Channel(channel_fd))

    return lambda: _ended(answer)


class _Answers:
    """Answers what the process of the test asks about the code's ``names``. The judge does not trust
    the answers."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._given: list[Any] = []
        self._handles: dict[int, int] = {}

    def serve(self, channel: Channel) -> None:
        """Until nobody asks any more: ``CodeFailed``."""
        while True:
            order = channel.receive()
            answer: dict[str, Any] = {}
            try:
                self._obey(order, answer)
            except Exception as error:  # noqa: BLE001 - reported to the test
                answer["raised"] = self._described(error)
            channel.send(answer)

    def _obey(self, order: dict[str, Any], answer: dict[str, Any]) -> None:
        if "names" in order:
            known = self._names.keys() & order["names"]
            answer["names"] = {name: self._offered(name, self._names[name]) for name in known}
        elif "test" in order:
            for part in ("setup", "test"):
                exec(compile(order[part], part, "exec", dont_inherit=True), self._names)
            answer["value"] = order["nonce"]
        else:
            arguments, named = decode(order["with"], lambda _, handle: self._given[handle])
            value = _OPERATIONS[order["do"]](self._given[order["of"]], *arguments, **named)
            answer["value"] = encode(value, self._export)
            after = encode([arguments, named], self._export)
            if after != order["with"]:
                answer["after"] = after

    def _offered(self, name: str, value: Any) -> Any:
        """A module, or a member of one, by its name: the process of the test has its own."""
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        genuine = genuine_member(name, value)
        return encode(value, self._export) if genuine is None else {"member": genuine}

    def _export(self, value: Any) -> Any:
        for kind, base in _BASES.items():
            if isinstance(value, kind):
                return encode(base(value), self._export)
        if id(value) not in self._handles:
            self._handles[id(value)] = len(self._given)
            self._given.append(value)
        return {"object": self._handles[id(value)]}

    def _described(self, error: Exception) -> list[Any]:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        try:
            return [kinds, encode(list(error.args), self._export)]
        except Exception:  # noqa: BLE001 - arguments that cannot travel, as text
            return [kinds, [str(error)]]


def _prepare(source_fd: int) -> bytes:
    """The source; and an interpreter that looks as if it had just been started with it."""
    size = os.fstat(source_fd).st_size
    source = b""
    while len(source) < size and (part := os.pread(source_fd, size - len(source), len(source))):
        source += part
    os.close(source_fd)
    sys.argv[:] = [_FILE]
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), "utf-8")
    for fd, name in ((1, "stdout"), (2, "stderr")):
        raw = io.FileIO(fd, "w", closefd=False)
        # As for a file: written when the buffer is full; errors at once.
        stream = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", write_through=fd == 2)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    return source


def _execute(source: bytes, name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__dict__["__file__"] = _FILE
    exec(compile(source, _FILE, "exec", dont_inherit=True), module.__dict__)
    return module


def _ended(run: Callable[[], object]) -> int:
    """Exit code of ``run()``, after what an interpreter does at its end: threads, ``atexit``, flushed output."""
    code = _outcome(run)
    for last in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        code = _outcome(last) or code
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # over the limit for files, or closed by the code
        code = code or 120
    return code


def _outcome(run: Callable[[], object]) -> int:
    try:
        run()
    except SystemExit as error:
        return _exit_code(error.code)
    except BaseException:  # noqa: BLE001 - the code's own, shown as the interpreter would
        _write_traceback()
        return 1
    return 0


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{code}\n")
    return 1


def _write_traceback() -> None:
    # The code may have closed or replaced stderr, and its exceptions may not be printable.
    try:
        traceback.print_exc(file=sys.__stderr__)
    except BaseException:  # noqa: BLE001
        os.write(2, b"an exception that cannot be shown\n")
