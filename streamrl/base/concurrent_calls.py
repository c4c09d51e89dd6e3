"""Concurrent calls on anyio task groups: several calls at once whose first error is raised plainly, and one call in the
background. The controller, engine processes and the workers of user code use them."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar, TypeVarTuple

from anyio import Event, create_task_group
from anyio.abc import TaskGroup

from streamrl.base.errors import leaves

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


async def all_of(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Return the results in the order of ``calls``. Where a call raises, the others are cancelled and its error is
    raised without an exception group."""
    results: dict[int, T] = {}

    async def run(index: int, call: Callable[[], Awaitable[T]]) -> None:
        results[index] = await call()

    try:
        async with create_task_group() as group:
            for index, call in enumerate(calls):
                group.start_soon(run, index, call)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return [results[index] for index in range(len(calls))]


class BackgroundCall(Generic[T]):
    """A call that runs in the task group ``nursery`` from its construction on. Its error is raised by the task
    group."""

    def __init__(self, nursery: TaskGroup, call: Callable[[], Awaitable[T]]) -> None:
        self._results: list[T] = []
        self._finished = Event()
        nursery.start_soon(self._run, call)

    async def result(self) -> T:
        """Wait for the call to end and return its result."""
        await self._finished.wait()
        return self._results[0]

    async def _run(self, call: Callable[[], Awaitable[T]]) -> None:
        self._results.append(await call())
        self._finished.set()


def first_error(error: BaseException) -> BaseException:
    """The first leaf of an exception group, or the error itself."""
    return next(leaves(error))


def retrieve_exception(future: Future[Any]) -> None:
    """Retrieve the exception, if any, of a future that nobody awaits any more, so that asyncio does not log it."""
    if future.done() and not future.cancelled():
        future.exception()


def start_unless_ending(
    group: TaskGroup, work: Callable[[*Arguments], Coroutine[Any, Any, object]], *arguments: *Arguments
) -> None:
    """Start ``work`` as a child of ``group``, unless the group is cancelled: anyio refuses a child of a group that has
    ended, and this RuntimeError would hide the error that ends the run."""
    if not group.cancel_scope.cancel_called:
        group.start_soon(work, *arguments)
