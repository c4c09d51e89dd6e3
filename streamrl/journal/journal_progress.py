"""Numbers that only grow, and coroutines that wait until one is large enough; and the thread that makes them grow."""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Protocol

from streamrl.journal.journal_errors import JournalFailed


class Progress:
    """A number that grows. ``advance`` and ``fail`` may be called by any thread, ``reached`` on any event loop."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self._failure: JournalFailed | None = None
        self._lock = threading.Lock()
        self._order = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    def advance(self, value: int) -> None:
        """The number is ``value`` now; those who waited for that much go on."""
        with self._lock:
            self.value = value
            ready = []
            while self._waiting and self._waiting[0][0] <= value:
                ready.append(heapq.heappop(self._waiting)[2])
        _wake(ready, None)

    def fail(self, failure: JournalFailed) -> None:
        """It will never grow again: everybody who waits, and who asks from now on, gets the failure."""
        with self._lock:
            self._failure = failure
            ready, self._waiting = [future for *_, future in self._waiting], []
        _wake(ready, failure)

    async def reached(self, value: int) -> None:
        """Return once the number is at least ``value``. Raises ``JournalFailed``."""
        with self._lock:
            if self._failure is not None:
                raise self._failure.again()
            if self.value >= value:
                return
            future = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (value, next(self._order), future))
        await future


def _wake(futures: list[asyncio.Future[None]], failure: JournalFailed | None) -> None:
    for loop in {future.get_loop() for future in futures}:
        with suppress(RuntimeError):  # that loop was closed: nobody waits there any more
            loop.call_soon_threadsafe(_settle, [f for f in futures if f.get_loop() is loop], failure)


def _settle(futures: list[asyncio.Future[None]], failure: JournalFailed | None) -> None:
    for future in futures:
        if future.done():
            continue  # its coroutine was cancelled
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure.again())


class Lane(Protocol):
    """Where a journal's disk calls are made."""

    def wake(self) -> None:
        """There is work: call it soon, from one place at a time."""

    def join(self) -> None:
        """Return once the work said that it was the last."""


class WriterThread:
    """Calls ``work`` in a thread of its own whenever ``wake`` was called, until it returns True; at most once every
    ``interval_s``, so that a fast disk does not make many small groups of a stream of records. A record that comes
    after a pause does not wait."""

    def __init__(self, work: Callable[[], bool], interval_s: float) -> None:
        self._work = work
        self._interval_s = interval_s
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        if not self._due.is_set():
            self._due.set()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        ended, next_at = False, 0.0
        while not ended:
            self._due.wait()
            if (early := next_at - time.monotonic()) > 0:
                time.sleep(early)
            next_at = time.monotonic() + self._interval_s
            # Before the work: what comes while it looks is seen by it, or calls it again.
            self._due.clear()
            ended = self._work()
