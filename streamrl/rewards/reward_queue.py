"""The calls of one reward: how many at once, how many a second, which begins next, what is tried again."""

from __future__ import annotations

import heapq
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from msgspec import structs

from streamrl.base.types import RewardFailureKind
from streamrl.recipe.rewards import Reward
from streamrl.rewards.time_limits import TimeLimits
from streamrl.rewards.values import CallResult, CheckedValue

LONGEST_PAUSE_S = 60.0


class RewardQueue:
    """Begins calls of ``reward`` by rank, the smallest first, then in the order in which they came."""

    def __init__(self, reward: Reward, default_concurrency: int) -> None:
        self.reward = reward
        self.limits = TimeLimits(reward)
        self.running = 0
        self._concurrency = reward.concurrency or default_concurrency
        self._waiting: list[tuple[int, int, anyio.Event]] = []
        self._asked = 0
        self._next_start = 0.0

    @property
    def free(self) -> bool:
        """Return whether a call may begin now, and is never made a second time."""
        busy = bool(self._waiting) or self.running >= self._concurrency
        return not busy and not self.reward.rate_per_s and not self.reward.retries

    def call_now(self, call: Callable[[float], CallResult], key: str) -> CallResult:
        """The result of a plain function. Only where the queue is ``free``."""
        result = call(self.limits.limit_s(key))
        self._observe(key, result)
        return result

    async def call(self, call: Callable[[float], Awaitable[CallResult]], *, key: str, rank: int = 0) -> CallResult:
        """The result of ``call(limit_s)``, after retries. ``key``: whose time limit it has."""
        asked_at = anyio.current_time()
        tries = 0
        while True:
            async with self._turn(rank):
                result = await call(self.limits.limit_s(key))
            if tries >= self.reward.retries or not _raised(result):
                break
            tries += 1
            pause_s = min(self.reward.backoff_s * 2 ** (tries - 1), LONGEST_PAUSE_S)
            # Jitter, so that calls which a service refused together do not come back together.
            await anyio.sleep(pause_s * random.uniform(0.75, 1.25))
        self._observe(key, result)
        waited_s = max(anyio.current_time() - asked_at - result.seconds, 0.0)
        return structs.replace(result, waited_s=waited_s)

    @asynccontextmanager
    async def _turn(self, rank: int) -> AsyncIterator[None]:
        if self._waiting or self.running >= self._concurrency:
            self._asked += 1
            turn = (rank, self._asked, anyio.Event())
            heapq.heappush(self._waiting, turn)
            try:
                await turn[2].wait()
            except BaseException:
                if turn[2].is_set():
                    self._end_turn()
                else:
                    self._waiting.remove(turn)
                    heapq.heapify(self._waiting)
                raise
        else:
            self.running += 1
        try:
            if self.reward.rate_per_s:
                now = anyio.current_time()
                self._next_start = max(self._next_start, now) + 1.0 / self.reward.rate_per_s
                await anyio.sleep(self._next_start - 1.0 / self.reward.rate_per_s - now)
            yield
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        self.running -= 1
        while self._waiting and self.running < self._concurrency:
            self.running += 1
            heapq.heappop(self._waiting)[2].set()

    def _observe(self, key: str, result: CallResult) -> None:
        if self.reward.adaptive_timeout is not None:
            for value in result.values:
                self.limits.observe(key, result.seconds, total_of(self.reward, value))


def _raised(result: CallResult) -> bool:
    return any(v.failure is not None and v.failure.kind is RewardFailureKind.RAISED for v in result.values)


def total_of(reward: Reward, value: CheckedValue) -> float | None:
    """Total of a reward: the value, or the sum of its parts by ``part_weights``. None: not applicable, or failed."""
    if value.parts:
        return sum(reward.part_weights.get(name, 1.0) * part for name, part in value.parts.items())
    return value.value
