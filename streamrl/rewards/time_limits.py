"""How long a call may take, learnt from those that were correct (RollPacker, arXiv 2509.21009)."""

from __future__ import annotations

from streamrl.config.rewards import Reward

_MOST_KEYS = 200_000  # then the one that was learnt first is forgotten


class TimeLimits:
    """The limits of one reward: ``min(max(floor, factor * slowest correct call), ceiling)`` for each key; the ceiling
    where no call was correct yet, or the recipe does not ask for more."""

    def __init__(self, reward: Reward) -> None:
        self._ceiling_s = reward.time_limit_s
        self._adaptive = reward.adaptive_limit
        self._slowest_s: dict[str, float] = {}

    def limit_s(self, key: str) -> float:
        """For the next call of ``key``."""
        slowest_s = self._slowest_s.get(key)
        if self._adaptive is None or slowest_s is None:
            return self._ceiling_s
        return min(max(self._adaptive.floor_s, self._adaptive.factor * slowest_s), self._ceiling_s)

    def observe(self, key: str, seconds: float, value: float | None) -> None:
        """A call of ``key`` took ``seconds`` and gave ``value`` (None: nothing)."""
        if self._adaptive is None or value is None or value < self._adaptive.correct_from:
            return
        if seconds > self._slowest_s.get(key, -1.0):
            if key not in self._slowest_s and len(self._slowest_s) >= _MOST_KEYS:
                del self._slowest_s[next(iter(self._slowest_s))]
            self._slowest_s[key] = seconds

    @property
    def learnt(self) -> int:
        """Keys with a correct call."""
        return len(self._slowest_s)
