"""The first row of an iterator of prompts, read in a process of its own: ``python -m streamrl.run.prompts.first_row ...
SPEC``. The iterator is user code, which a check of the recipe neither imports nor waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec

from streamrl.base.errors import UNENCODABLE, StreamRLError
from streamrl.recipe.throwaway_process import answer_parent, run_throwaway
from streamrl.run.prompts.prompt_iterator import UserRows
from streamrl.run.prompts.prompt_rows import encode_row


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """The row, or the problem with its remedy."""

    row: Any = None
    problem: str = ""


def first_row(spec: str, timeout_s: float) -> tuple[Any, str]:
    """(the first row, "") of the iterator that ``spec`` names, or (None, the problem with its remedy)."""
    ran = run_throwaway("streamrl.run.prompts.first_row", [spec], timeout_s)
    if ran.written and not ran.failure:
        found = msgspec.msgpack.decode(ran.written, type=_Found)
        return found.row, found.problem
    if ran.late:
        return None, f"prompts {spec} gave no row within {timeout_s:g} s: make the first row come sooner"
    return None, f"prompts {spec} ended the process that opened it ({ran.failure or 'exit code 0'}): open it by hand"


async def _look(spec: str) -> _Found:
    rows = UserRows(spec)
    try:
        there, row = await rows.next_row()
    except StreamRLError as error:
        return _Found(problem=str(error))
    if not there:
        return _Found(problem=f"prompts {spec} is empty: it must give at least one row")
    try:
        return _Found(row=msgspec.msgpack.decode(encode_row(row)))
    except UNENCODABLE as error:
        return _Found(problem=f"prompts {spec}, row 1 has a value that cannot be sent ({error}): use plain values")


def _answer(answers: BinaryIO, arguments: Sequence[str]) -> None:
    [spec] = arguments
    answers.write(msgspec.msgpack.encode(asyncio.run(_look(spec))))


if __name__ == "__main__":
    answer_parent(_answer)
