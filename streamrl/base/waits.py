"""Registry of long waits in the controller, for the watchdog's report on a stalled run; and the phases of a start.

While a run starts, each process logs its present phase (``note_phase``), and the command's process reads the last phase
of each log (``start_phases``) to show it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path

from msgspec import Struct

from streamrl.base.types import Clock, TextsByName

_phase_log = getLogger("streamrl.start")
_PHASE = re.compile(r"(\S+ \S+) INFO streamrl\.start: (.*)")
_LOG_TIME = "%Y-%m-%d %H:%M:%S"
_LAST_CHARACTERS = 1 << 14


class NamedWait(Struct, frozen=True, kw_only=True):
    """One wait. ``who``: component that waits; ``event``: awaited event, in words; ``since_s``: time of the registry's
    clock at its start."""

    who: str
    event: str
    since_s: float


class Waits:
    """Open waits of one process. Not thread-safe: for the coroutines of one event loop."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[int, NamedWait] = {}
        self._next = 0

    @contextmanager
    def waiting_for(self, event: str, who: str = "control") -> Iterator[None]:
        """Register a wait for the time of the block, as in
        ``with waits.waiting_for("engine-0 to stage version 7", who="publisher"): await ...``"""
        key = self._next
        self._next = self._next + 1
        self._open[key] = NamedWait(who=who, event=event, since_s=self._clock())
        try:
            yield
        finally:
            del self._open[key]

    def open(self) -> list[tuple[NamedWait, float]]:
        """Return the open waits and their seconds so far, the longest first."""
        now = self._clock()
        waits = sorted(self._open.values(), key=lambda wait: wait.since_s)
        return [(wait, now - wait.since_s) for wait in waits]

    def lines(self) -> list[str]:
        """Return the open waits as sentences, the longest first."""
        return [f"{wait.who} waits for {wait.event}, for {seconds:.1f} s" for wait, seconds in self.open()]


def note_phase(phase: str) -> None:
    """Log the present phase of this process, such as ``imports vLLM``."""
    _phase_log.info("%s", phase)


def start_phases(logs: Path, names: Iterable[str], started: Path) -> TextsByName:
    """Read the last phase of each process from its log; processes without one are left out.

    ``logs``: directory of the logs;
    ``names``: names of the processes;
    ``started``: file that was written when the processes were started; older lines of a log are of an earlier start."""
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
