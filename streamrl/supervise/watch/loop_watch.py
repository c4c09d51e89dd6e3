"""Watches that the event loop of a process answers. A loop that something blocks can tell nobody: a thread does it.

A task beats; a thread looks at the beats. What it sees late is a metric; after ``STACKS_AFTER_S`` the stacks of all
threads are written once, and after ``ABORT_AFTER_S`` the process ends: nothing in it can be saved any more, and whoever
waits for it must not wait for ever. When the whole process was stopped (a debugger, SIGSTOP, a sleeping laptop) the
thread was, too, and nobody is blamed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

import anyio

BEAT_S = 0.05
WARN_AFTER_S = 0.25
STACKS_AFTER_S = 5.0
ABORT_AFTER_S = 60.0


class LoopWatch:
    """``report(lag_s)`` and ``abort(lag_s)`` are called in the watching thread. Run ``beat`` in the loop that is
    watched, inside of ``with``."""

    def __init__(
        self,
        report: Callable[[float], None],
        abort: Callable[[float], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._abort = abort
        self._clock = clock
        self._beat_s = clock()
        self._worst_s = 0.0
        self._late = 0
        self._reported = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)

    def __enter__(self) -> LoopWatch:
        self._beat_s = self._clock()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(1.0)

    async def beat(self) -> None:
        """Until it is cancelled."""
        while True:
            self.beaten(self._clock())
            await anyio.sleep(BEAT_S)

    def beaten(self, now_s: float) -> None:
        """The loop answered at ``now_s``."""
        self._worst_s = max(self._worst_s, now_s - self._beat_s - BEAT_S)
        self._beat_s = now_s
        self._reported = False

    def take_worst(self) -> float:
        """Longest time in seconds without an answer since this was asked for last; below ``WARN_AFTER_S``: 0."""
        worst, self._worst_s = self._worst_s, 0.0
        return worst if worst >= WARN_AFTER_S else 0.0

    def look(self, now_s: float, slept_s: float) -> None:
        """What the thread does again and again. ``slept_s``: since it did so last."""
        if slept_s > 20 * BEAT_S:
            self._beat_s = now_s  # the process stood still as a whole
            return
        lag_s = now_s - self._beat_s
        if lag_s >= ABORT_AFTER_S:
            self._abort(lag_s)
        elif lag_s >= STACKS_AFTER_S and not self._reported:
            self._reported = True
            self._report(lag_s)

    def _watch(self) -> None:
        before = self._clock()
        while not self._stop.wait(BEAT_S):
            now = self._clock()
            self.look(now, now - before)
            before = now
