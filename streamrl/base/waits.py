"""Named waits: who waits for what, since when. One registry a run; a long wait registers itself where it waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec


class NamedWait(msgspec.Struct, frozen=True, kw_only=True):
    """``who`` waits for ``what``; ``since_s``: of the registry's clock."""

    who: str
    what: str
    since_s: float


class Waits:
    """Named waits of one process. Not thread-safe: for the coroutines of one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[int, NamedWait] = {}
        self._next = 0

    @contextmanager
    def waiting_for(self, what: str, who: str = "control") -> Iterator[None]:
        """``with waits.waiting_for("engine-0 to stage version 7", who="publisher"): await ...``"""
        key, self._next = self._next, self._next + 1
        self._open[key] = NamedWait(who=who, what=what, since_s=self._clock())
        try:
            yield
        finally:
            del self._open[key]

    def open(self) -> list[tuple[NamedWait, float]]:
        """Open waits with the seconds that they have lasted, the longest first."""
        now = self._clock()
        waits = sorted(self._open.values(), key=lambda wait: wait.since_s)
        return [(wait, now - wait.since_s) for wait in waits]

    def lines(self) -> list[str]:
        """The same for people."""
        return [f"{wait.who} waits for {wait.what}, for {seconds:.1f} s" for wait, seconds in self.open()]
