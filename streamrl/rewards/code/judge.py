"""The judge: runs one test against the code, which lives in another process. Only the standard library is loaded."""

from __future__ import annotations

import builtins
import functools
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from streamrl.rewards.code import results  # noqa: F401 - tests of calls import it, where no file can be opened
from streamrl.rewards.code.names import own_names
from streamrl.rewards.code.peer import TEST_MODULE, ChannelEnded, CodeFailed, Peer

_MOST_CHARACTERS = 300


def prepare(test_fd: int, verdict_fd: int, channel_fd: int) -> Callable[[], int]:
    """What runs the test that ``test_fd`` orders, writes the verdict to ``verdict_fd`` (both JSON), and gives 0.

    The order: ``{"nonce", "setup", "test", "entry_point"}``. The verdict: ``{"nonce", "verdict", "message"}``, with
    "passed", "failed" (the code is wrong) or "broken" (the test cannot be run with any code).
    """
    order = json.loads(os.pread(test_fd, os.fstat(test_fd).st_size, 0))
    os.close(test_fd)

    def decide() -> int:
        verdict, message = _run_test(order, Peer(channel_fd, is_judge=True))
        answer = {"nonce": order["nonce"], "verdict": verdict, "message": message[:_MOST_CHARACTERS]}
        os.write(verdict_fd, json.dumps(answer).encode())
        return 0

    return decide


def _run_test(order: dict[str, Any], peer: Peer) -> tuple[str, str]:
    try:
        setup = compile(order["setup"], "setup", "exec", dont_inherit=True)
        test = compile(order["test"], "test", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return "broken", f"the test is no Python: {error}"
    module = types.ModuleType(TEST_MODULE)
    sys.modules[TEST_MODULE] = module
    try:
        entry_point = order["entry_point"]
        own = functools.partial(own_names, order["setup"], order["test"], entry_point)
        module.__dict__.update(peer.receive_names(entry_point, own))
        exec(setup, module.__dict__)
        exec(test, module.__dict__)
    except ModuleNotFoundError as error:
        if error is peer.raised:
            return "failed", _described(error)
        return "broken", f"the test needs a module that the sandbox does not have: {error}"
    except ChannelEnded:
        return "failed", "the code ended while it was tested"
    except CodeFailed as error:
        return "failed", str(error)
    except builtins.BaseException as error:  # noqa: BLE001 - whatever the test or the code raises: not passed
        return "failed", _described(error)
    return "passed", ""


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - its text asks the code, which is gone
        return type(error).__name__
