"""Which request engines die of. Pure, but for the time that it is told.

All that an engine served when it died may be what it died of, and most of it is not. A completion that was there at
one death fewer than too many is *suspected*: those are sent one after the other, the next one when the last one was
answered or has been served for a while without harm. When an engine dies in that while, only the one that was just sent
is blamed.
"""

from __future__ import annotations

TRIAL_S = 1.0
"""What kills an engine mostly does so at once: in the prefill, or with the first token."""
REMEMBERED = 4096


class Suspects:
    """``limit``: at so many deaths a completion is taken for the cause (0: never)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._deaths: dict[str, int] = {}
        self._trial: tuple[str, object, float] | None = None

    def wait_s(self, whole: str, now: float) -> float:
        """For how long a completion must not be sent, unless another one is answered before."""
        if self._trial is None or not self._is_suspected(whole) or self._trial[0] == whole:
            return 0.0
        return max(self._trial[2] + TRIAL_S - now, 0.0)

    def sent(self, whole: str, engine: object, now: float) -> None:
        """It goes to ``engine``."""
        if self._is_suspected(whole):
            self._trial = whole, engine, now

    def answered(self, whole: str, *, complete: bool) -> None:
        """It came back from an engine that lives; a ``complete`` one is never sent again."""
        if self._trial is not None and self._trial[0] == whole:
            self._trial = None
        if complete:
            self._deaths.pop(whole, None)

    def died(self, whole: str, engine: object, now: float) -> int:
        """``engine`` died while it served this completion. At how many deaths it was taken for the cause, if that is
        too many; else 0."""
        on_trial = self._trial is not None and self._trial[1] is engine and now < self._trial[2] + TRIAL_S
        if on_trial and self._trial is not None and self._trial[0] != whole:
            return 0
        deaths = self._deaths[whole] = self._deaths.pop(whole, 0) + 1
        if len(self._deaths) > REMEMBERED:
            del self._deaths[next(iter(self._deaths))]
        return deaths if self._limit and deaths >= self._limit else 0

    def _is_suspected(self, whole: str) -> bool:
        return self._limit > 1 and self._deaths.get(whole, 0) >= self._limit - 1
