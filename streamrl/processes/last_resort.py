"""Ends this process when its loop hangs and keeps Python's lock: then no thread of Python's can do it.

Two timers of the C library, one after the other. When the loop has not armed the first for ``FIRST_S`` seconds it sets
the second (``alarm``), and when that runs out as well the signal ends the process, with all stacks in its log. While
the process is stopped (SIGSTOP, a debugger) the timers go on, so the first may be found run out when it continues. But
only then does the second begin: the loop has all of its time to answer, whatever the threads do first. What is left
is a process that is stopped once more before its loop ran at all, and then for longer than the second timer.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import signal
import sys
import time
from types import TracebackType

from streamrl.rewards.exit_timer import NativeTimer

log = logging.getLogger(__name__)

FIRST_S = 60.0
LAST_S = 180
"""Whole seconds. Longer than the first: a debugger stops the process again and again, for as long as people think."""


class LastResort:
    """Call ``rearm`` in the loop again and again, inside of ``with``."""

    def __init__(self) -> None:
        self._timer: NativeTimer | None = None
        self._armed_s = math.inf
        self._clears_until_s = -math.inf

    def __enter__(self) -> LastResort:
        try:
            self._timer = NativeTimer("alarm", LAST_S)
        except OSError as error:
            log.warning("no last resort (%s): a loop that keeps Python's lock for ever ends nobody", error)
            return self
        if sys.__stderr__ is not None:
            faulthandler.register(signal.SIGALRM, file=sys.__stderr__, all_threads=True, chain=True)
        return self

    def rearm(self) -> None:
        """The loop answers."""
        if self._timer is None:
            return
        self._timer.set(FIRST_S)
        now_s = time.monotonic()
        if now_s - self._armed_s >= FIRST_S:
            self._clears_until_s = now_s + LAST_S  # the thread that sets the alarm may be slower than this one
        if now_s < self._clears_until_s:
            signal.alarm(0)  # else there is none of ours: the timer of another one's is left alone
        self._armed_s = now_s

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is None:
            return
        self.rearm()
        self._timer.set(0.0)
        faulthandler.unregister(signal.SIGALRM)
