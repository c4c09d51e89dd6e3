"""Named waits: who waits for what, since when. One registry a run; a long wait registers itself where it waits.

While a run starts, the command waits for its processes: each notes in its log what it begins to do until it is ready
(``note_phase``), and the command reads the last note of each (``start_phases``)."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

_phase_log = logging.getLogger("streamrl.start")
_PHASE = re.compile(r"(\S+ \S+) INFO streamrl\.start: (.*)")
_LOG_TIME = "%Y-%m-%d %H:%M:%S"
_LAST_CHARACTERS = 1 << 14


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
        key = self._next
        self._next = self._next + 1
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


def note_phase(phase: str) -> None:
    """Note in the log of this process what it does now, such as ``imports vLLM``."""
    _phase_log.info("%s", phase)


def start_phases(logs: Path, names: Iterable[str], started: Path) -> dict[str, str]:
    """Phases of the processes ``names`` by their logs in ``logs``, without those that noted none yet. ``started``: file
    that was written when they were started; what was logged before is of an earlier start of the run."""
    phases = {}
    for name in names:
        try:
            begin = time.strftime(_LOG_TIME, time.localtime(started.stat().st_mtime))
            log = (logs / f"{name}.log").read_text(errors="replace")
        except OSError:
            continue
        for moment, phase in _PHASE.findall(log[-_LAST_CHARACTERS:]):
            if moment >= begin:
                phases[name] = phase
    return phases
