"""The first row of an iterator of prompts, read in a throw-away process.

``check_prompts`` calls ``first_row``, which starts ``python -m streamrl.run.prompts.first_row`` with its spec. The
iterator is user code: the process that checks a recipe must neither import it nor wait for it without limit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, BinaryIO

from msgspec import Struct, msgpack

from streamrl.base.errors import UNENCODABLE, StreamRLError
from streamrl.recipe.throwaway_process import answer_parent, run_throwaway
from streamrl.run.prompts.prompt_iterator import UserRows
from streamrl.run.prompts.prompt_rows import encode_row


class _FirstRow(Struct, frozen=True, kw_only=True):
    """The row, or the problem with its remedy."""

    row: Any = None
    problem: str = ""


def first_row(spec: str, timeout_s: float) -> tuple[Any, str]:
    """Return (the first row, "") of the iterator that ``spec`` names, or (None, the problem with its remedy)."""
    result = run_throwaway("streamrl.run.prompts.first_row", [spec], timeout_s)
    if result.written and not result.failure:
        first = msgpack.decode(result.written, type=_FirstRow)
        return first.row, first.problem
    if result.late:
        return None, f"prompts {spec} gave no row within {timeout_s:g} s: make the first row come sooner"
    failure = result.failure or "exit code 0"
    return None, f"prompts {spec} ended the process that opened it ({failure}): open it by hand"


async def _read(spec: str) -> _FirstRow:
    rows = UserRows(spec)
    try:
        has_row, row = await rows.next_row()
    except StreamRLError as error:
        return _FirstRow(problem=str(error))
    if not has_row:
        return _FirstRow(problem=f"prompts {spec} is empty: it must give at least one row")
    try:
        return _FirstRow(row=msgpack.decode(encode_row(row)))
    except UNENCODABLE as error:
        return _FirstRow(problem=f"prompts {spec}, row 1 has a value that cannot be sent ({error}): use plain values")


def _answer(answers: BinaryIO, arguments: Sequence[str]) -> None:
    """Write the first row for the parent process. ``arguments``: the spec of the iterator."""
    [spec] = arguments
    answers.write(msgpack.encode(asyncio.run(_read(spec))))


if __name__ == "__main__":
    answer_parent(_answer)
