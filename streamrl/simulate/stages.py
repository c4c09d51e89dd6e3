"""Virtual time (``EventQueue``), and the costs of rewards, environments, training and pushes in it. Fleet files have
the models; ``simulation`` runs the clocks, and ``calibrate`` replays a record with ``TrainerClock``."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np
from msgspec import Struct

from streamrl.recipe.rewards import AdaptiveTimeout, Reward
from streamrl.rewards.time_limits import TimeLimits


class RewardModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rewards: their times are log-normal, their values 0 or 1. Completions at the cap get 0.

    ``median_s``, ``sigma``: parameters of the seconds of one reward (median 0: no time);
    ``concurrency``: rewards at once (0: any number);
    ``timeout_s``: time limit, after which a reward is 0 (0: no limit);
    ``adaptive_timeout``: shorter limits of the recipe;
    ``rollout_slowdown``: factor of the time of a decode step while rewards are computed, where a judge has a share of
      the engines' devices;
    ``solved``: share of rewards that are 1;
    ``spread``: spread of the solve rate between prompts, in standard normal units."""

    median_s: float = 0.0
    sigma: float = 0.0
    concurrency: int = 0
    timeout_s: float = 0.0
    adaptive_timeout: AdaptiveTimeout | None = None
    rollout_slowdown: float = 1.0
    solved: float = 0.5
    spread: float = 1.0


class EnvironmentModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Environment, for recipes that have one.

    ``turn_tokens``: sampled tokens of a turn, so that longer completions have more turns (0: one turn);
    ``appended_tokens``: tokens that the environment appends before a turn;
    ``seconds``: mean time of the environment after a turn, which has an exponential distribution;
    ``factor``: factor of all seconds, those of a recorded run included."""

    turn_tokens: float = 0.0
    appended_tokens: int = 0
    seconds: float = 0.0
    factor: float = 1.0


class TrainerModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of training.

    ``token_s``, ``sequence_s``: forward and backward of one trained token and of one sequence, at full speed;
    ``optimizer_s``: seconds to close a batch;
    ``streaming_speed``: share of full speed at which groups are trained during the rollout (0: they are trained at the
      close only, or on devices of freed engines), to which freed engines add their share of the difference to full
      speed;
    ``streaming_tokens``: tokens of waiting work at which an idle trainer begins, with all of it, while work that comes
      to a busy trainer waits;
    ``rollout_slowdown``: factor of the time of a decode step while the trainer works, where both share cores."""

    token_s: float
    sequence_s: float = 0.0
    optimizer_s: float = 0.0
    streaming_speed: float = 0.0
    streaming_tokens: int = 0
    rollout_slowdown: float = 1.0


class PushModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of a push and of a round.

    ``seconds``: time from the optimizer step until the new version is live;
    ``pause_s``: last part of this time, during which engines are paused;
    ``abort_barrier_s``: additional time where requests were aborted;
    ``round_s``: fixed cost of a step's rollout, such as the start and stop of engines, before they continue;
    ``kind_s``: additional time by kind of round, such as rewards that begin after the rollout;
    ``to_ranks_s``, ``to_engines_s``: additional time where engines and ranks take turns, until the step begins (engines
      sleep, the rank's state is moved) and until the version is live (it is moved back, engines wake)."""

    seconds: float = 0.0
    pause_s: float = 0.0
    abort_barrier_s: float = 0.0
    round_s: float = 0.0
    kind_s: dict[str, float] = {}
    to_ranks_s: float = 0.0
    to_engines_s: float = 0.0


class RewardServers:
    """Servers of rewards, ``concurrency`` of them, first come first served. Service times are drawn in blocks.
    ``running``: rewards that have begun or wait for a server, counted by the simulation."""

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
        """(time at which the reward of a completion that ended ``now`` is known, the reward)."""
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
    """The trainer in virtual time. Work is measured in seconds at full speed: current work, and waiting work.
    ``speed``: current share of full speed; ``worked_s``: work done since the start."""

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
        """Time at which the trainer is idle unless more work comes."""
        if not self.speed:
            return self._time
        work_s = self._work_s
        if self._waiting_tokens >= self.model.streaming_tokens:
            work_s += self._waiting_s
        return self._time + work_s / self.speed

    def advance(self, now: float) -> None:
        """Train until ``now``."""
        available_s = self.speed * (now - self._time)
        self._time = now
        while available_s > 0 and self._work_s > 0:
            work_s = min(self._work_s, available_s)
            available_s -= work_s
            self.worked_s += work_s
            self._work_s = self._work_s - work_s if work_s < self._work_s else 0.0
            self._begin()

    def take(self, now: float, samples: int, tokens: int) -> None:
        """Add the work of a group that joined the batch."""
        self.advance(now)
        self._waiting_s += tokens * self.model.token_s + samples * self.model.sequence_s
        self._waiting_tokens += tokens
        self._begin()

    def free(self, now: float, share: float) -> None:
        """Train on the devices of freed engines until the batch is complete. ``share``: share of the freed engines in
        all engines."""
        self.advance(now)
        streaming_speed = self.model.streaming_speed
        self.speed = streaming_speed + (1 - streaming_speed) * share
        self._begin()

    def _begin(self) -> None:
        """Begin the waiting work where the trainer is idle and enough of it waits."""
        if self.speed and not self._work_s and self._waiting_tokens >= self.model.streaming_tokens:
            self._work_s = self._waiting_s
            self._waiting_s = 0.0
            self._waiting_tokens = 0

    def close(self, now: float, *, engines_idle: bool) -> float:
        """Complete the batch. Returns the time at which the trainer has stepped. ``engines_idle``: whether the trainer
        has full speed for the remaining work; otherwise it has streaming speed, since engines use their cores."""
        self.advance(now)
        remaining_s = self._work_s + self._waiting_s
        streaming_speed = self.model.streaming_speed
        self.worked_s += remaining_s
        self._work_s = 0.0
        self._waiting_s = 0.0
        self._waiting_tokens = 0
        self.speed = streaming_speed
        closing_speed = 1.0
        if streaming_speed and not engines_idle:
            closing_speed = streaming_speed
        return now + remaining_s / closing_speed + self.model.optimizer_s


class EventQueue:
    """Queue of the events of a simulation. ``now``: virtual time in seconds, which the caller moves. Events of equal
    time come in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int | Callable[[], None], int]] = []
        self._serial = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, time: float, event: int | Callable[[], None], stamp: int = 0) -> None:
        """Add an event at ``time``: a function to call, or the number of an engine. The event of an engine counts only
        while the engine has the same ``stamp``."""
        self._serial += 1
        heappush(self._heap, (time, self._serial, event, stamp))

    def call_after(self, seconds: float, function: Callable[[], None]) -> None:
        """Call ``function`` ``seconds`` from now."""
        self.add(self.now + seconds, function)

    def next(self) -> tuple[float, int | Callable[[], None], int]:
        """Remove the first event and return it as (time, event, stamp). The caller moves ``now``."""
        time, _, event, stamp = heappop(self._heap)
        return time, event, stamp
