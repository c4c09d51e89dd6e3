"""Code of the jailed process: it runs the model's code as a program, or loads it as a module and answers questions.

``zygote`` passes these functions to ``jail``, which calls them in the confined process. Imports only the standard
library."""

from __future__ import annotations

import atexit
import io
import json
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from streamrl.rewards.sandbox.values import encode

_FILE = "solution.py"


def as_program(source_fd: int) -> Callable[[], int]:
    """Return a function that runs the code as ``python solution.py`` would, and returns its exit code."""
    source = _prepare(source_fd)

    def run_main() -> None:
        _execute(source, "__main__")

    return lambda: _run_to_the_end(run_main)


def as_module(source_fd: int, order_fd: int, answer_fd: int) -> Callable[[], int]:
    """Return a function that loads the code as a module, carries out the order and writes the answer, both JSON.

    The order is ``{"setup": Python}`` with one of ``{"questions": [expression, ...]}``, ``{"function": name,
    "arguments": [...]}`` and ``{"test": Python, "nonce": text}``. The answer is ``{"values": [...]}`` (the nonce, for a
    test that passed) or ``{"raised": text}``."""
    source = _prepare(source_fd)
    order = json.loads(_read(order_fd))

    def answer() -> None:
        # The name "solution" keeps the code's own __main__ part from running.
        names = vars(_execute(source, "solution"))
        try:
            result: dict[str, Any] = {"values": _values(names, order)}
        except Exception as error:  # noqa: BLE001 - reported as the test's outcome
            result = {"raised": f"{type(error).__name__}: {error}"}
        content = memoryview(json.dumps(result).encode())
        while content:
            content = content[os.write(answer_fd, content) :]

    return lambda: _exit_code_of(answer)


def _values(names: dict[str, Any], order: dict[str, Any]) -> list[Any]:
    exec(compile(order["setup"], "setup", "exec", dont_inherit=True), names)
    if "function" in order:
        name = order["function"]
        function = names[name] if name in names else getattr(names["Solution"](), name)
        return [encode(function(*order["arguments"]))]
    if "test" in order:
        exec(compile(order["test"], "test", "exec", dont_inherit=True), names)
        return [order["nonce"]]
    return [encode(eval(compile(text, "test", "eval", dont_inherit=True), names)) for text in order["questions"]]


def _read(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    content = b""
    while len(content) < size and (part := os.pread(fd, size - len(content), len(content))):
        content += part
    os.close(fd)
    return content


def _prepare(source_fd: int) -> bytes:
    """Return the source, and make this interpreter look as if it had just been started with it."""
    source = _read(source_fd)
    sys.argv[:] = [_FILE]
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), "utf-8")
    for fd, name in ((1, "stdout"), (2, "stderr")):
        raw = io.FileIO(fd, "w", closefd=False)
        # Buffered as for a file: stdout is written when the buffer is full, stderr at once.
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


def _run_to_the_end(run: Callable[[], object]) -> int:
    """Exit code of ``run()``, after the steps of an interpreter at its end: join threads, call ``atexit`` functions,
    flush output."""
    code = _exit_code_of(run)
    for final_call in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        code = _exit_code_of(final_call) or code
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # the output is over the limit for files, or the code has closed the stream
        code = code or 120
    return code


def _exit_code_of(run: Callable[[], object]) -> int:
    try:
        run()
    except SystemExit as error:
        return _exit_code(error.code)
    except BaseException:  # noqa: BLE001 - an exception of the code, which an interpreter would print, too
        _write_traceback()
        return 1
    return 0


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{code}\n")
    return 1


def _write_traceback() -> None:
    # The code may have closed or replaced stderr, and its exceptions may not be printable.
    try:
        traceback.print_exc(file=sys.__stderr__)
    except BaseException:  # noqa: BLE001
        os.write(2, b"an exception that cannot be shown\n")
