"""Time limits of calls, learnt from those that were correct (RollPacker, arXiv 2509.21009)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from streamrl.recipe.rewards import Reward

_MOST_KEYS = 200_000  # then the one that was learnt first is forgotten
_KEYS_IN_PIECE = 20_000


class TimeLimits:
    """The limits of one reward: ``min(max(floor, factor * slowest correct call), ceiling)`` for each key; the ceiling
    where no call was correct yet, or the recipe does not ask for more. ``late_is_wrong``: of the recipe."""

    def __init__(self, reward: Reward) -> None:
        self.late_is_wrong = reward.late_is_wrong
        self._ceiling_s = reward.timeout_s
        self._adaptive = reward.adaptive_timeout
        self._slowest_s: dict[str, float] = {}
        self._news: dict[str, float] = {}

    def limit_s(self, key: str) -> float:
        """Time limit of the next call of ``key``."""
        slowest_s = self._slowest_s.get(key)
        if self._adaptive is None or slowest_s is None:
            return self._ceiling_s
        return min(max(self._adaptive.min_s, self._adaptive.factor * slowest_s), self._ceiling_s)

    def observe(self, key: str, seconds: float, value: float | None) -> None:
        """A call of ``key`` took ``seconds`` and gave ``value`` (None: nothing)."""
        if self._adaptive is None or value is None or value < self._adaptive.correct_from:
            return
        if _keep_slowest(self._slowest_s, key, seconds):
            self._news[key] = seconds

    def take_updates(self) -> dict[str, float]:
        """Slowest correct calls that were observed since the last time, by key."""
        if not self._news:
            return {}
        news = self._news
        self._news = {}
        return news

    def remember(self, slowest_s: Mapping[str, float]) -> None:
        """Start from what another worker, or another life of this one, has observed."""
        for key, seconds in slowest_s.items():
            _keep_slowest(self._slowest_s, key, seconds)


class LearntLimits:
    """Observations of all workers of a run, by the name of the reward; they outlive each worker. ``slowest_s``: the
    slowest correct calls by reward and key, in seconds. ``since``: the version of the rewards that brought each one. A
    reward that is replaced starts without any, whatever calls of its predecessor still report."""

    def __init__(
        self, since: Mapping[str, int] | None = None, slowest_s: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        self.since = dict(since or {})
        self.slowest_s = {name: dict(found) for name, found in (slowest_s or {}).items() if name in self.since}

    def attached(self, since: Mapping[str, int]) -> None:
        """Set the rewards that score from now on. Observations of others are forgotten."""
        same = {name for name, version in since.items() if self.since.get(name) == version}
        self.since = dict(since)
        self.slowest_s = {name: found for name, found in self.slowest_s.items() if name in same}

    def observed(self, version: int, slowest_s: Mapping[str, Mapping[str, float]]) -> None:
        """A worker reports what functions of ``version`` took."""
        for name, found in slowest_s.items():
            if version >= self.since.get(name, version + 1):
                known = self.slowest_s.setdefault(name, {})
                for key, seconds in found.items():
                    _keep_slowest(known, key, seconds)

    def pieces(self, version: int) -> Iterator[dict[str, dict[str, float]]]:
        """Yield the observations for a worker that has loaded ``version``, in pieces that a message has room for."""
        for name, found in self.slowest_s.items():
            if version < self.since[name]:
                continue
            keys = list(found)
            for begin in range(0, len(keys), _KEYS_IN_PIECE):
                yield {name: {key: found[key] for key in keys[begin : begin + _KEYS_IN_PIECE]}}


def _keep_slowest(slowest_s: dict[str, float], key: str, seconds: float) -> bool:
    """Note a call. False: a slower one was known."""
    known = slowest_s.get(key)
    if known is not None and seconds <= known:
        return False
    if known is None and len(slowest_s) >= _MOST_KEYS:
        del slowest_s[next(iter(slowest_s))]
    slowest_s[key] = seconds
    return True
