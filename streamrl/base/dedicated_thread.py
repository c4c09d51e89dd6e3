"""A thread for blocking calls, used by an engine process (vLLM) and by a trainer rank.

The kernel's ``PR_SET_PDEATHSIG`` follows the *thread* that spawned a child, so vLLM's processes must be spawned by a
thread that lives as long as they do; and loading takes 15 to 45 s, while the event loop must go on. A daemon thread
ends with the process."""

from __future__ import annotations

import asyncio
import queue
from asyncio import Future, get_running_loop
from collections.abc import Callable
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
_Work = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class DedicatedThread:
    """Runs calls one at a time in one thread, from the first call until ``close`` or the end of the process."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the thread and return its result. Cancelling abandons the result, not the call."""
        if not self._thread.is_alive():
            self._thread.start()
        loop = get_running_loop()
        future: Future[T] = loop.create_future()
        self._work.put((loop, future, function))
        return await future

    def close(self) -> None:
        """End the thread after all calls before this one. Returns at once."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            loop, future, function = work
            try:
                result = function()
                error = None
            except BaseException as exception:  # noqa: BLE001 - every kind is raised in the caller
                result = None
                error = exception
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, result, error)
            del work, future, function, result, error  # keep no engine alive while waiting


def _settle(future: Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:  # a future takes no StopIteration
        future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
