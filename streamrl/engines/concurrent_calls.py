"""Several calls at once, one plain error out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

T = TypeVar("T")


async def all_of(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Results in the order of ``calls``. When one raises the others are cancelled, and its error is raised as it is."""
    results: dict[int, T] = {}

    async def run(index: int, call: Callable[[], Awaitable[T]]) -> None:
        results[index] = await call()

    try:
        async with anyio.create_task_group() as group:
            for index, call in enumerate(calls):
                group.start_soon(run, index, call)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return [results[index] for index in range(len(calls))]


def first_error(error: BaseException) -> BaseException:
    """The first leaf of an exception group, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
