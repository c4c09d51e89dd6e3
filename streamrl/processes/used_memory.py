"""The shared memory that a run uses, and Python's resource trackers, which unlink it: a killed one would leave it
behind unseen."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil

from streamrl.processes.sweep import RunTraces, is_resource_tracker, members, record_segments, session_of

_SCAN_S = 2.0


class UsedMemory:
    """``trackers``: the resource trackers that were seen, with the name of the process that started each."""

    def __init__(self, traces: RunTraces) -> None:
        self.trackers: dict[psutil.Process, str] = {}
        self._traces = traces
        self._next_s = 0.0

    def record_at_times(self, owners: Mapping[int, str]) -> None:
        """As ``record``, every two seconds."""
        if time.monotonic() >= self._next_s:
            self.record(owners)
            self._next_s = time.monotonic() + _SCAN_S

    def record(self, owners: Mapping[int, str]) -> None:
        """Look at what is used now. ``owners``: names of the processes of the run, by session."""
        found = members(self._traces)
        record_segments(self._traces, found)
        for process in found:
            if process not in self.trackers and is_resource_tracker(process):
                owner = owners.get(session_of(process))
                if owner is not None:
                    self.trackers[process] = owner

    def forget(self, owner: str) -> None:
        """``owner`` and all that it had started are gone."""
        self.trackers = {tracker: name for tracker, name in self.trackers.items() if name != owner}

    def gone(self) -> list[tuple[psutil.Process, str]]:
        """Trackers that died, with their owners."""
        return [(tracker, owner) for tracker, owner in self.trackers.items() if not _lives(tracker)]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
