"""What will happen next: one heap, and the time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum
from typing import Any


class Kind(IntEnum):
    """What happens at a time. ``ANSWER``: a function is called."""

    ENGINE = 0
    ARRIVAL = 1
    REWARD = 2
    TRAINER_IDLE = 3
    PAUSE = 4
    ANSWER = 5


class Agenda:
    """``now``: seconds of virtual time. Entries of equal time come in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, Any, int]] = []
        self._serial = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, time: float, kind: int, subject: Any, stamp: int = 0) -> None:
        """``kind`` happens to ``subject`` at ``time``; ``stamp`` tells whoever made it whether it still holds."""
        self._serial += 1
        heapq.heappush(self._heap, (time, self._serial, kind, subject, stamp))

    def call_after(self, seconds: float, function: Callable[[], None]) -> None:
        """Call ``function`` so many seconds from now."""
        self.add(self.now + seconds, Kind.ANSWER, function)

    def next(self) -> tuple[float, int, int, Any, int]:
        """Take the first entry: (time, serial, kind, subject, stamp). The caller moves ``now``."""
        return heapq.heappop(self._heap)
