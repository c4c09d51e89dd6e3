"""A thread that lives as long as what it started.

``PR_SET_PDEATHSIG`` follows the *thread* that spawned a child, so an engine's processes must be spawned by a thread
that stays; and loading takes 15 to 45 s, in which the event loop must go on. A daemon thread ends with the process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_Work = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class DedicatedThread:
    """Runs calls one at a time in one thread, from the first call until ``close`` or the end of the process."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def call(self, function: Callable[[], T]) -> T:
        """Result of ``function()`` in the thread. Cancelling abandons the result, not the call."""
        if not self._thread.is_alive():
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._work.put((loop, future, function))
        return await future

    def close(self) -> None:
        """Let the thread end after the calls it was given."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            loop, future, function = work
            try:
                result = function()
                error = None
            except BaseException as raised:  # noqa: BLE001 - every kind is handed to the caller
                result = None
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, result, error)
            del work, future, function, result, error  # keep no engine alive while waiting


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
