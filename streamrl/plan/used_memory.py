"""The shared memory that a run uses, and Python's resource trackers, which unlink it: a killed one would leave it
behind unseen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import psutil

from streamrl.supervise.sweep import RunTraces, is_resource_tracker, members, record_segments, session_of

_SCAN_S = 2.0


class Tracking(NamedTuple):
    """``owner``: name of the process of the run that a tracker belongs to; ``user``: who started the tracker."""

    owner: str
    user: psutil.Process | None


class UsedMemory:
    """``trackers``: the resource trackers that were seen."""

    def __init__(self, traces: RunTraces) -> None:
        self.trackers: dict[psutil.Process, Tracking] = {}
        self._traces = traces
        self._next_s = 0.0

    @property
    def due(self) -> bool:
        """It is two seconds since the last ``record``."""
        return time.monotonic() >= self._next_s

    def record(self, owners: Mapping[int, str]) -> None:
        """Look at what is used now. ``owners``: names of the processes of the run, by session."""
        self._next_s = time.monotonic() + _SCAN_S
        found = members(self._traces)
        record_segments(self._traces, found)
        for process in found:
            if process not in self.trackers and is_resource_tracker(process):
                owner = owners.get(session_of(process))
                if owner is not None:
                    self.trackers[process] = Tracking(owner, _parent(process))

    def forget(self, owner: str) -> None:
        """``owner`` and all that it had started are gone."""
        self.trackers = {tracker: of for tracker, of in self.trackers.items() if of.owner != owner}

    def gone(self) -> list[tuple[psutil.Process, str]]:
        """Trackers that died, with their owners. One that ended after its user did what it was there for."""
        ended = {tracker: of for tracker, of in self.trackers.items() if not _lives(tracker)}
        for tracker, of in ended.items():
            if of.user is not None and not _lives(of.user):
                del self.trackers[tracker]
        return [(tracker, of.owner) for tracker, of in ended.items() if tracker in self.trackers]


def _parent(process: psutil.Process) -> psutil.Process | None:
    try:
        return process.parent()
    except psutil.Error:
        return None


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
