"""The judge: runs one test and calls the code, which lives in another process. Only the standard library is loaded."""

from __future__ import annotations

import ast
import json
import os
import re
import secrets
import sys
import types
from collections.abc import Callable
from typing import Any

from streamrl.sandbox.calls import Channel, Code, CodeFailed, RunInside
from streamrl.sandbox.names import TextOfTest
from streamrl.sandbox.results import same_result

_MOST_CHARACTERS = 300
_WORD = re.compile(r"[^\W\d]\w*")  # compiled before the fork


def prepare(test_fd: int, verdict_fd: int, channel_fd: int) -> Callable[[], int]:
    """What runs the test that ``test_fd`` orders, writes the verdict to ``verdict_fd`` (both JSON), and gives 0.

    The order: ``{"nonce", "setup", "test", "entry_point", "call", "forgeable"}``, of which ``call`` is null or
    ``[arguments, expected, tolerance]`` for the function ``entry_point``. The verdict: ``{"nonce", "verdict",
    "message", "inside"}``, with "passed", "failed" (the code is wrong) or "broken" (the test cannot be run with any
    code); ``inside``: the test ran in the code's process, which can forge that it passed.
    """
    order = json.loads(os.pread(test_fd, os.fstat(test_fd).st_size, 0))
    os.close(test_fd)

    def decide() -> int:
        verdict, message, inside = _run_test(order, Code(Channel(channel_fd)))
        answer = {"verdict": verdict, "message": message[:_MOST_CHARACTERS], "inside": inside, "nonce": order["nonce"]}
        os.write(verdict_fd, json.dumps(answer).encode())
        return 0

    return decide


def _run_test(order: dict[str, Any], code: Code) -> tuple[str, str, bool]:
    try:
        trees = [ast.parse(order[part]) for part in ("setup", "test")]
        text = TextOfTest(*trees)
        programs = [compile(tree, "test", "exec", dont_inherit=True) for tree in trees]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return "broken", f"the test is no Python: {error}", False
    inside = order["call"] is None and text.must_run_inside()
    if not inside:
        message = _message(lambda: _run_here(order, code, programs, text))
        inside = order["call"] is None and code.must_run_inside
    if not inside:
        if message.startswith(ModuleNotFoundError.__name__) and not isinstance(code.raised, ModuleNotFoundError):
            return "broken", f"the test needs a module that the sandbox does not have: {message}", False
    elif order["forgeable"]:
        message = _message(lambda: code.run_inside(order["setup"], order["test"], secrets.token_hex(16)))
    else:
        return "broken", "it handles objects of the code's, and rewards.options.forgeable is false", True
    return ("failed" if message else "passed"), message, inside


def _message(passes: Callable[[], bool]) -> str:
    """What is wrong with the code; empty where nothing is."""
    try:
        return "" if passes() else "it gave something else than expected"
    except (CodeFailed, RunInside) as error:
        return str(error)
    except BaseException as error:  # noqa: BLE001 - whatever the test or the code raises: not passed
        return f"{type(error).__name__}: {error}"


def _run_here(order: dict[str, Any], code: Code, programs: list[types.CodeType], text: TextOfTest) -> bool:
    entry_point = order["entry_point"]
    module = types.ModuleType("test")
    sys.modules["test"] = module
    wanted = {*_WORD.findall(f"{order['setup']}\n{order['test']}"), "Solution", entry_point}
    names = code.names(wanted, entry_point, text)
    function = names.pop(entry_point, None) if order["call"] else None
    module.__dict__.update(names)
    for program in programs:
        exec(program, module.__dict__)
    if order["call"] is None:
        return True
    arguments, expected, tolerance = order["call"]
    given = (function or getattr(names["Solution"](), entry_point))(*arguments)
    # APPS wraps what a function returns in a list, in some of its tasks.
    answers = [expected, *(expected if isinstance(expected, list) and len(expected) == 1 else ())]
    return any(same_result(given, answer, tolerance) for answer in answers)
