"""Virtual time; reward, training and weight push as service times in it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import msgspec
import numpy as np

from streamrl.recipe.rewards import AdaptiveTimeout, Reward
from streamrl.rewards.time_limits import TimeLimits


class RewardModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one reward: log-normal with ``median_s`` (0: none) and ``sigma``. ``concurrency``: rewards at once
    (0: any number). ``timeout_s``: after which a reward is 0 (0: none); ``adaptive_timeout``: the recipe's, below it.

    ``rollout_slowdown``: a decode step takes so many times as long while rewards are computed, where a judge has a
    share of the engines' devices.

    ``solved``: share of rewards that are 1, the others are 0; ``spread``: of the solve rate between prompts, in
    standard normal units. Completions at the cap get 0."""

    median_s: float = 0.0
    sigma: float = 0.0
    concurrency: int = 0
    timeout_s: float = 0.0
    adaptive_timeout: AdaptiveTimeout | None = None
    rollout_slowdown: float = 1.0
    solved: float = 0.5
    spread: float = 1.0


class EnvironmentModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Environment of a recipe that has one. ``turn_tokens``: sampled in a turn, so that longer ones have more turns
    (0: one); ``appended_tokens``: before each; ``seconds``: after each, mean of an exponential distribution.
    ``factor``: by which all seconds are multiplied, also those of a recorded run."""

    turn_tokens: float = 0.0
    appended_tokens: int = 0
    seconds: float = 0.0
    factor: float = 1.0


class TrainerModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``token_s``, ``sequence_s``: forward and backward of one trained token, and of one sequence, at full speed.

    ``optimizer_s``: closing a batch. ``streaming_speed``: share of that speed at which groups are trained while the
    rollout goes on (0: only at the close, or on devices of freed engines); engines that are freed add their share of
    what is missing to full speed. Work that comes while it is busy waits; an idle trainer begins once
    ``streaming_tokens`` wait, and then takes all of it. ``rollout_slowdown``: a decode step takes so many times as long
    while the trainer works, where they share cores."""

    token_s: float
    sequence_s: float = 0.0
    optimizer_s: float = 0.0
    streaming_speed: float = 0.0
    streaming_tokens: int = 0
    rollout_slowdown: float = 1.0


class PushModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``seconds``: from the optimizer step until the new version is live; the last ``pause_s`` of it the engines stand
    still. ``abort_barrier_s``: on top, where requests were aborted; ``kind_s``: on top, by kind of round, such as
    rewards that begin after the rollout. ``round_s``: fixed cost of a step's rollout, such as engine start and stop;
    spent before the engines go on."""

    seconds: float = 0.0
    pause_s: float = 0.0
    abort_barrier_s: float = 0.0
    round_s: float = 0.0
    kind_s: dict[str, float] = {}


class RewardServers:
    """Draws service times in blocks and queues them on ``concurrency`` servers, first come first served. ``running``:
    rewards that have begun, or wait for a server."""

    def __init__(self, model: RewardModel, seed: int) -> None:
        self.model = model
        self.running = 0
        limits = Reward(function="", timeout_s=model.timeout_s or math.inf, adaptive_timeout=model.adaptive_timeout)
        self._limits = TimeLimits(limits)
        self._source = np.random.default_rng([seed, 7])
        self._free_at: list[float] = [0.0] * model.concurrency
        self._block: list[float] = []
        self._uniform: list[float] = []
        self._levels = (self._source.standard_normal(1 << 14) * model.spread + _logit(model.solved)).tolist()

    def score(self, now: float, prompt: int, *, truncated: bool) -> tuple[float, float]:
        """(when the reward of a completion that ended ``now`` is known, the reward)."""
        reward = 0.0 if truncated else self._reward(prompt)
        model = self.model
        if not model.median_s:
            return now, reward
        if not self._block:
            self._block = (model.median_s * np.exp(self._source.standard_normal(4096) * model.sigma)).tolist()
        seconds = self._block.pop()
        if model.timeout_s:
            limit_s = self._limits.limit_s(str(prompt))
            if seconds > limit_s:
                seconds = limit_s
                reward = 0.0
            self._limits.observe(str(prompt), seconds, reward)
        if not self._free_at:
            return now + seconds, reward
        end = max(now, self._free_at[0]) + seconds
        heapq.heapreplace(self._free_at, end)
        return end, reward

    def _reward(self, prompt: int) -> float:
        if not self._uniform:
            uniform = self._source.random(4096)
            self._uniform = np.log(uniform / (1 - uniform)).tolist()
        return float(self._uniform.pop() < self._levels[hash((prompt, 3)) & ((1 << 14) - 1)])


def _logit(share: float) -> float:
    share = min(max(share, 1e-6), 1 - 1e-6)
    return math.log(share / (1 - share))


class TrainerClock:
    """The work of the trainer, in seconds at full speed: the current work, and what waits."""

    def __init__(self, model: TrainerModel) -> None:
        self.model = model
        self.speed = model.streaming_speed
        self.worked_s = 0.0
        self._work_s = 0.0
        self._waiting_s = 0.0
        self._waiting_tokens = 0
        self._time = 0.0

    @property
    def idle_at(self) -> float:
        """Time at which all work is done that will begin before more comes."""
        begins = self._waiting_tokens >= self.model.streaming_tokens
        ahead = self._work_s + (self._waiting_s if begins else 0.0)
        return self._time + (ahead / self.speed if self.speed else 0.0)

    def advance(self, now: float) -> None:
        """Train until ``now``."""
        able = self.speed * (now - self._time)
        self._time = now
        while able > 0 and self._work_s > 0:
            done = min(self._work_s, able)
            able -= done
            self.worked_s += done
            self._work_s = self._work_s - done if done < self._work_s else 0.0
            self._begin()

    def take(self, now: float, samples: int, tokens: int) -> None:
        """A group joined the batch."""
        self.advance(now)
        self._waiting_s += tokens * self.model.token_s + samples * self.model.sequence_s
        self._waiting_tokens += tokens
        self._begin()

    def free(self, now: float, share: float) -> None:
        """Use the devices of that share of the engines for training until the batch is complete."""
        self.advance(now)
        own = self.model.streaming_speed
        self.speed = own + (1 - own) * share
        self._begin()

    def _begin(self) -> None:
        if self.speed and not self._work_s and self._waiting_tokens >= self.model.streaming_tokens:
            self._work_s = self._waiting_s
            self._waiting_s = 0.0
            self._waiting_tokens = 0

    def close(self, now: float, *, engines_idle: bool) -> float:
        """The batch is complete: when the trainer has stepped. Where engines keep their cores, at streaming speed."""
        self.advance(now)
        left = self._work_s + self._waiting_s
        full = engines_idle or not self.model.streaming_speed
        self.worked_s += left
        self._work_s = 0.0
        self._waiting_s = 0.0
        self._waiting_tokens = 0
        self.speed = self.model.streaming_speed
        return now + left / (1.0 if full else self.model.streaming_speed) + self.model.optimizer_s


class EventQueue:
    """``now``: seconds of virtual time. Entries of equal time come in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int | Callable[[], None], int]] = []
        self._serial = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, time: float, what: int | Callable[[], None], stamp: int = 0) -> None:
        """Add an event at ``time``: of the engine of that number, if its ``stamp`` still holds; or a call of
        ``what``."""
        self._serial += 1
        heapq.heappush(self._heap, (time, self._serial, what, stamp))

    def call_after(self, seconds: float, function: Callable[[], None]) -> None:
        """Call ``function`` so many seconds from now."""
        self.add(self.now + seconds, function)

    def next(self) -> tuple[float, int | Callable[[], None], int]:
        """Take the first entry: (time, what, stamp). The caller moves ``now``."""
        time, _, what, stamp = heapq.heappop(self._heap)
        return time, what, stamp
