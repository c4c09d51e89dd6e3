"""The guardian as the supervisor sees it: it is told of every session, and replaced when it was killed."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from streamrl.supervise.child_process import ChildProcess, open_guardian
from streamrl.supervise.exit_reason import Death
from streamrl.supervise.guardian import Done, Ended, Session
from streamrl.supervise.sweep import RunTraces

log = logging.getLogger(__name__)

_GUARDED_S, _GUARDIANS = 1.0, 3  # so many in succession that end sooner: none can run here, and no run is without one


class GuardedSessions:
    """``python``: the interpreter of the guardian. ``traces``: its sessions are those that are guarded, from ``open``
    to ``close``. ``guardian``: the one that guards now."""

    def __init__(self, python: str, run_directory: Path, traces: RunTraces) -> None:
        self._python, self._run_directory, self._traces = python, run_directory, traces
        self._short, self._again_s = 0, 0.0
        self.guardian: ChildProcess | None = None

    def open(self) -> None:
        """Start the first guardian, or the next one."""
        self.guardian = open_guardian(self._python, self._run_directory, self._traces)

    def add(self, child: ChildProcess) -> ChildProcess:
        """Guard the session that ``child`` leads; returns it."""
        self._traces.sessions[child.process.pid] = child.created
        if self.guardian is not None:
            self.guardian.tell(Session(sid=child.process.pid, created=child.created))
        return child

    def forget(self, child: ChildProcess) -> None:
        """Nothing is left of the session that ``child`` led. Its number may become that of somebody else's."""
        self._traces.sessions.pop(child.process.pid, None)
        if self.guardian is not None:
            self.guardian.tell(Ended(sid=child.process.pid))

    def tend(self) -> None:
        """A guardian that was killed guards nobody: another one takes over, with all sessions so far."""
        guardian = self.guardian
        if guardian is None or guardian.running or self.loss() or time.monotonic() < self._again_s:
            return
        self._short = self._short + 1 if guardian.lived_s < _GUARDED_S else 0
        log.warning("%s; another one is started", guardian.death(self._run_directory).describe())
        guardian.close()
        try:
            self.open()
        except OSError as error:
            log.error("no guardian can be started now: %s", error)
            guardian.has_no_successor()
            self._again_s = time.monotonic() + _GUARDED_S

    def loss(self) -> list[Death]:
        """The death of the last guardian, where none can run."""
        guardian = self.guardian
        if guardian is None or guardian.running or guardian.lived_s >= _GUARDED_S or self._short < _GUARDIANS:
            return []
        return [guardian.death(self._run_directory)]

    def close(self) -> None:
        """Everything was ended: so does it."""
        if self.guardian is not None:
            self.guardian.tell(Done())
            self.guardian.close()
            self.guardian = None
