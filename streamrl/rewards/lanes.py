"""One lane for each reward: how many calls at once, how many a second, which goes next, what is tried again."""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from streamrl.base.types import RewardFailureKind
from streamrl.recipe.rewards import Reward
from streamrl.rewards.calls.call_child import PoolCall
from streamrl.rewards.time_limits import TimeLimits
from streamrl.rewards.values import CallResult, CheckedValue

LONGEST_PAUSE_S = 60.0


class LaneCall(msgspec.Struct):
    """A call that was asked for. ``key``: whose time limit it has."""

    completion: Any
    arguments: Mapping[str, Any]
    count: int
    key: str
    rank: int
    asked_at: float
    on_done: Callable[[CallResult], None]
    tries: int = 0


class RewardLane:
    """Starts the calls of one reward, smallest rank first, then in the order in which they came."""

    def __init__(self, index: int, reward: Reward, start: Callable[[PoolCall], None], default_concurrency: int) -> None:
        self.reward = reward
        self.limits = TimeLimits(reward)
        self.running = 0
        self._index = index
        self._start = start
        self._concurrency = reward.concurrency or default_concurrency
        self._waiting: list[tuple[int, int, LaneCall]] = []
        self._asked = 0
        self._next_start = 0.0
        self._pausing: asyncio.TimerHandle | None = None
        self._beginning = False
        self._closed = False

    def call(
        self,
        completion: Any,
        arguments: Mapping[str, Any],
        on_done: Callable[[CallResult], None],
        *,
        count: int,
        key: str,
        rank: int = 0,
    ) -> None:
        """``on_done(result)`` is called once with the result of ``function(completion, **arguments)``, after retries:
        now or later, or never where the lane is closed before."""
        self._ask(LaneCall(completion, arguments, count, key, rank, time.monotonic(), on_done))

    def close(self) -> None:
        """Begin no more calls, and tell of none."""
        self._closed = True
        self._waiting.clear()
        if self._pausing is not None:
            self._pausing.cancel()

    def _ask(self, call: LaneCall) -> None:
        self._asked += 1
        if not self._waiting and not self.reward.rate_per_s and self.running < self._concurrency:
            self._start_call(call, self._asked)  # the usual case: there is nothing to choose from
            return
        heapq.heappush(self._waiting, (call.rank, self._asked, call))
        self._begin_some()

    def _begin_some(self) -> None:
        if self._beginning or self._closed:  # a call ended as soon as it began: the loop below goes on
            return
        self._beginning = True
        try:
            self._begin()
        finally:
            self._beginning = False

    def _begin(self) -> None:
        while self._waiting and self.running < self._concurrency:
            if self.reward.rate_per_s:
                now = time.monotonic()
                if now < self._next_start:
                    self._resume_at(self._next_start - now)
                    return
                self._next_start = max(self._next_start, now) + 1.0 / self.reward.rate_per_s
            _, order, call = heapq.heappop(self._waiting)
            self._start_call(call, order)

    def _start_call(self, call: LaneCall, order: int) -> None:
        self.running += 1
        self._start(
            PoolCall(
                function=self._index,
                completion=call.completion,
                arguments=call.arguments,
                count=call.count,
                limit_s=self.limits.limit_s(call.key),
                rank=(call.rank, order),
                on_done=partial(self._ended, call),
                asked_at=call.asked_at,
            )
        )

    def _resume_at(self, seconds: float) -> None:
        if self._pausing is None:
            self._pausing = asyncio.get_running_loop().call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._pausing = None
        self._begin_some()

    def _ended(self, call: LaneCall, result: CallResult) -> None:
        self.running -= 1
        if self._closed:
            return
        if call.tries < self.reward.retries and _raised(result):
            call.tries += 1
            pause_s = min(self.reward.backoff_s * 2 ** (call.tries - 1), LONGEST_PAUSE_S)
            # Jitter, so that calls which a service refused together do not come back together.
            asyncio.get_running_loop().call_later(pause_s * random.uniform(0.75, 1.25), self._ask_again, call)
        else:
            if self.reward.adaptive_timeout is not None:
                for value in result.values:
                    self.limits.observe(call.key, result.seconds, total_of(self.reward, value))
            call.on_done(result)
        if self._waiting:
            self._begin_some()

    def _ask_again(self, call: LaneCall) -> None:
        if not self._closed:
            self._ask(call)


def _raised(result: CallResult) -> bool:
    return any(v.failure is not None and v.failure.kind is RewardFailureKind.RAISED for v in result.values)


def total_of(reward: Reward, value: CheckedValue) -> float | None:
    """What the reward is: the value, or the sum of its parts by ``part_weights``. None: not applicable, or failed."""
    if value.parts:
        return sum(reward.part_weights.get(name, 1.0) * part for name, part in value.parts.items())
    return value.value
