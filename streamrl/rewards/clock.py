"""Clocks that user code in this process does not stop."""

from __future__ import annotations

import time


class Clock:
    """The functions of ``time``, taken before user code is imported. Libraries such as freezegun replace them in
    ``time`` and in each module that imported them by name, but not in classes."""

    monotonic = staticmethod(time.monotonic)
    perf_counter = staticmethod(time.perf_counter)
    process_time = staticmethod(time.process_time)
    sleep = staticmethod(time.sleep)
