"""The first row of a user's iterator, from a process of its own: ``python -m streamrl.prompts.prompt_probe S SPEC``.

Checking a recipe must not import user code into the checking process, nor wait for it without a limit.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from typing import Any

import msgspec

from streamrl.base.errors import UNENCODABLE, StreamRLError
from streamrl.prompts.probe_process import answer_of
from streamrl.prompts.prompt_iterator import UserRows


class _Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What the process found: the row, or the problem."""

    row: Any = None
    problem: str = ""


def probe_in_subprocess(spec: str, timeout_s: float) -> tuple[Any, str]:
    """(the first row, "") of the iterator that ``spec`` names, or (None, the problem with its remedy)."""
    found = answer_of("streamrl.prompts.prompt_probe", [str(timeout_s), spec], timeout_s)
    if found is None:
        return None, f"prompts {spec} gave no row within {timeout_s:g} s: make the first row come sooner"
    answer, code = found
    if not answer:
        return None, f"prompts {spec} ended the process that opened it (exit code {code}): open it by hand"
    probe = msgspec.msgpack.decode(answer, type=_Probe)
    return probe.row, probe.problem


async def _first_row(spec: str) -> _Probe:
    rows = UserRows(spec)
    try:
        there, row = await rows.next_row()
    except StreamRLError as error:
        return _Probe(problem=str(error))
    if not there:
        return _Probe(problem=f"prompts {spec} is empty: it must give at least one row")
    return _Probe(row=row)


def main(seconds: float, spec: str) -> None:
    """Write the first row as MessagePack; what the user's code prints goes to stderr."""
    # The default action of SIGALRM ends the process even while the interpreter lock is held, or the parent is dead.
    signal.alarm(math.ceil(seconds) + 1)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    probe = asyncio.run(_first_row(spec))
    try:
        encoded = msgspec.msgpack.encode(probe)
    except UNENCODABLE as error:
        problem = f"prompts {spec}, row 1 has a value that cannot be sent ({error}): use plain values"
        encoded = msgspec.msgpack.encode(_Probe(problem=problem))
    answer.write(encoded)
    answer.flush()
    os._exit(0)  # a thread that the user's module left behind must not keep this process


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
