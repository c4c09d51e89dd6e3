"""Queue of the calls of one reward: concurrency, rate, order and retries.

A ``RewardSet`` has one queue for each of its rewards, in the reward worker or in the process of a command."""

from __future__ import annotations

import heapq
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from msgspec.structs import replace

from streamrl.base.types import RewardFailureKind
from streamrl.recipe.rewards import Reward
from streamrl.rewards.time_limits import TimeLimits
from streamrl.rewards.values import CallResult, CheckedValue

LONGEST_PAUSE_S = 60.0
"""Limit of the pause before a retry."""


class RewardQueue:
    """Begins calls of ``reward`` by rank, the smallest first; calls of equal rank in the order of their requests."""

    def __init__(self, reward: Reward, default_concurrency: int) -> None:
        self.reward = reward
        self.limits = TimeLimits(reward)
        self.running = 0
        self._concurrency = reward.concurrency or default_concurrency
        self._waiting: list[tuple[int, int, anyio.Event]] = []  # heap: rank, number of the request, its turn has come
        self._requests = 0
        self._next_start = 0.0

    @property
    def free(self) -> bool:
        """Return whether a call may begin now and is never retried."""
        busy = bool(self._waiting) or self.running >= self._concurrency
        return not busy and not self.reward.rate_per_s and not self.reward.retries

    def call_now(self, call: Callable[[float], CallResult], key: str) -> CallResult:
        """The result of a plain function. To be called only while the queue is ``free``."""
        result = call(self.limits.limit_s(key))
        self._observe(key, result)
        return result

    async def call(self, call: Callable[[float], Awaitable[CallResult]], *, key: str, rank: int = 0) -> CallResult:
        """The result of ``call(limit_s)``, after retries. ``key``: key of the adaptive time limit."""
        requested_at = anyio.current_time()
        tries = 0
        while True:
            async with self._turn(rank):
                result = await call(self.limits.limit_s(key))
            if tries >= self.reward.retries or not _raised(result):
                break
            tries += 1
            pause_s = min(self.reward.backoff_s * 2 ** (tries - 1), LONGEST_PAUSE_S)
            # Jitter: calls that a service refused at the same time are not retried at the same time.
            await anyio.sleep(pause_s * random.uniform(0.75, 1.25))
        self._observe(key, result)
        waited_s = max(anyio.current_time() - requested_at - result.seconds, 0.0)
        return replace(result, waited_s=waited_s)

    @asynccontextmanager
    async def _turn(self, rank: int) -> AsyncIterator[None]:
        """One of the ``running`` calls, for the block; the rate delays the start of the block."""
        if self._waiting or self.running >= self._concurrency:
            self._requests += 1
            may_begin = anyio.Event()
            turn = (rank, self._requests, may_begin)
            heapq.heappush(self._waiting, turn)
            try:
                await may_begin.wait()
            except BaseException:  # cancelled
                if may_begin.is_set():
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
                # ``_next_start`` is the start of the call after this one.
                await anyio.sleep(self._next_start - 1.0 / self.reward.rate_per_s - now)
            yield
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        self.running -= 1
        while self._waiting and self.running < self._concurrency:
            self.running += 1
            _, _, may_begin = heapq.heappop(self._waiting)
            may_begin.set()

    def _observe(self, key: str, result: CallResult) -> None:
        if self.reward.adaptive_timeout is not None:
            for value in result.values:
                self.limits.observe(key, result.seconds, total_of(self.reward, value))


def _raised(result: CallResult) -> bool:
    failures = [value.failure for value in result.values if value.failure is not None]
    return any(failure.kind is RewardFailureKind.RAISED for failure in failures)


def total_of(reward: Reward, value: CheckedValue) -> float | None:
    """Total of a reward: the value, or the sum of its parts by ``part_weights``. None: not applicable, or failure."""
    if value.parts:
        return sum(reward.part_weights.get(name, 1.0) * part for name, part in value.parts.items())
    return value.value
