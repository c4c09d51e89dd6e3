"""Adaptive time limits of calls, learnt from the calls that were correct (RollPacker, arXiv 2509.21009).

``TimeLimits`` belongs to one reward, in the reward worker or in a call process. ``LearntLimits`` gathers the
observations of all workers in the reward stage (controller), which sends them to workers that load the same rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from streamrl.recipe.rewards import Reward

_MOST_KEYS = 200_000  # beyond it the key that was learnt first is forgotten
_KEYS_IN_MESSAGE = 20_000


class TimeLimits:
    """The limits of one reward: ``min(max(floor, factor * slowest correct call), ceiling)`` for each key; the ceiling
    where no call was correct yet, or the recipe sets no ``adaptive_timeout``. ``late_is_wrong``: setting of the
    recipe."""

    def __init__(self, reward: Reward) -> None:
        self.late_is_wrong = reward.late_is_wrong
        self._ceiling_s = reward.timeout_s
        self._adaptive = reward.adaptive_timeout
        self._slowest_s: dict[str, float] = {}
        self._updates: dict[str, float] = {}

    def limit_s(self, key: str) -> float:
        """Time limit of the next call of ``key``."""
        slowest_s = self._slowest_s.get(key)
        if self._adaptive is None or slowest_s is None:
            return self._ceiling_s
        return min(max(self._adaptive.min_s, self._adaptive.factor * slowest_s), self._ceiling_s)

    def observe(self, key: str, seconds: float, value: float | None) -> None:
        """Observe a call of ``key`` that took ``seconds`` and gave ``value`` (None: no value)."""
        if self._adaptive is None or value is None or value < self._adaptive.correct_from:
            return
        if _keep_slowest(self._slowest_s, key, seconds):
            self._updates[key] = seconds

    def take_updates(self) -> dict[str, float]:
        """Slowest correct calls that were observed since the last call of this method, by key."""
        updates = self._updates
        self._updates = {}
        return updates

    def remember(self, slowest_s: Mapping[str, float]) -> None:
        """Add observations of another worker, or of a predecessor of this worker."""
        for key, seconds in slowest_s.items():
            _keep_slowest(self._slowest_s, key, seconds)


class LearntLimits:
    """Observations of all workers of a run; they outlive each worker. ``slowest_s``: seconds of the slowest correct
    calls by reward and key; ``since``: version of the rewards that brought each reward. A reward that replaces another
    begins without observations, even where workers still report calls of the replaced function."""

    def __init__(
        self, since: Mapping[str, int] | None = None, slowest_s: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        self.since = dict(since or {})
        self.slowest_s = {name: dict(by_key) for name, by_key in (slowest_s or {}).items() if name in self.since}

    def attached(self, since: Mapping[str, int]) -> None:
        """Set the rewards that score from now on. Observations of all other rewards are forgotten."""
        unchanged = {name for name, version in since.items() if self.since.get(name) == version}
        self.since = dict(since)
        self.slowest_s = {name: by_key for name, by_key in self.slowest_s.items() if name in unchanged}

    def observed(self, version: int, slowest_s: Mapping[str, Mapping[str, float]]) -> None:
        """Add observations that a worker reports about functions of ``version``."""
        for name, by_key in slowest_s.items():
            if version >= self.since.get(name, version + 1):
                slowest_of_reward = self.slowest_s.setdefault(name, {})
                for key, seconds in by_key.items():
                    _keep_slowest(slowest_of_reward, key, seconds)

    def messages(self, version: int) -> Iterator[dict[str, dict[str, float]]]:
        """Yield the observations for a worker that has loaded ``version``, split so that each part fits a message."""
        for name, by_key in self.slowest_s.items():
            if version < self.since[name]:
                continue
            keys = list(by_key)
            for begin in range(0, len(keys), _KEYS_IN_MESSAGE):
                yield {name: {key: by_key[key] for key in keys[begin : begin + _KEYS_IN_MESSAGE]}}


def _keep_slowest(slowest_s: dict[str, float], key: str, seconds: float) -> bool:
    """Enter a call of ``key`` into ``slowest_s``. False: an earlier call was slower, or equally slow."""
    slowest_so_far = slowest_s.get(key)
    if slowest_so_far is not None and seconds <= slowest_so_far:
        return False
    if slowest_so_far is None and len(slowest_s) >= _MOST_KEYS:
        del slowest_s[next(iter(slowest_s))]
    slowest_s[key] = seconds
    return True
