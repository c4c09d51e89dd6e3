"""Tells an engine that stands still from a slow one, by what it does and not by what it says of itself. Pure."""

from __future__ import annotations

import math

LONGEST_LOOK_S = 2.0
"""No more than this counts between two looks: when the looker itself was held up, so was what it would have heard."""


class ProgressWatch:
    """One engine. ``silence_timeout_s``: it reports a few times a second, so nothing at all for so long means that its
    process stands still. ``progress_timeout_s``: requests are open, it is not paused, and none of them got on for so
    long. A slow engine gets on."""

    def __init__(self, *, silence_timeout_s: float, progress_timeout_s: float) -> None:
        self._limits = silence_timeout_s, progress_timeout_s
        self._looked = -math.inf
        self._heard = -1
        self._progress: tuple[int, ...] = ()
        self._silent = self._stalled = 0.0

    def look(self, now: float, *, heard: int, progress: tuple[int, ...], owes: bool) -> str:
        """Why it is to be ended; empty while it is not. ``now`` in seconds; ``heard``: how many events came from it so
        far; ``progress``: counters that grow when a request gets on; ``owes``: whether they should."""
        seconds, self._looked = min(now - self._looked, LONGEST_LOOK_S), now
        self._silent = self._silent + seconds if heard == self._heard else 0.0
        self._stalled = self._stalled + seconds if owes and progress == self._progress else 0.0
        self._heard, self._progress = heard, progress
        silence_timeout_s, progress_timeout_s = self._limits
        if self._silent >= silence_timeout_s:
            return f"nothing was heard from it for {self._silent:.0f} s (engines.advanced.silence_timeout_s)"
        if self._stalled >= progress_timeout_s:
            return f"none of its requests got on for {self._stalled:.0f} s (engines.advanced.progress_timeout_s)"
        return ""
