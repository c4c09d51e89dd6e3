"""Launch and outcome of a trajectory. Each that is launched has one outcome: scored, failed, or lost."""

from __future__ import annotations

from streamrl.base.messages import Message, ReturnedCall
from streamrl.base.types import (
    Completion,
    Prompt,
    Record,
    RewardFailure,
    ScoredTrajectory,
    TokenArray,
    Trajectory,
    TrajectoryId,
)


class SampledSoFar(Record, frozen=True):
    """Tokens of the first turn of a trajectory until now: ``completion``, whose finish reason is abort unless it is
    whole; sampled in ``parts`` requests, during which it was in the engines for ``seconds``."""

    completion: Completion
    parts: int
    seconds: float


class TurnSoFar(Record, frozen=True):
    """A turn of an episode that is not over. ``appended`` and ``after``: that the episode asked for it with."""

    appended: TokenArray
    after: int | None
    completion: Completion
    seconds: float


class EpisodeSoFar(Record, frozen=True):
    """Turns of an episode that is not over, and the calls of tools that have returned."""

    turns: tuple[TurnSoFar, ...] = ()
    returned: tuple[ReturnedCall, ...] = ()


class LaunchTrajectory(Message, frozen=True):
    """Sample one trajectory. ``group_size`` siblings share ``prompt``; ``seed`` is derived from its identity.
    ``sampling``: parameters of its requests that differ from the run's. ``done``: what it had in an earlier life of the
    controller; one that is whole goes on to its reward. ``sampled``: the same, of a whole trajectory of an
    environment; ``so_far``: the same, of an episode that begins again."""

    id: TrajectoryId
    prompt: Prompt
    group_size: int
    seed: int
    evaluation: bool = False
    sampling: dict[str, int | float] = {}
    done: SampledSoFar | None = None
    sampled: Trajectory | None = None
    so_far: EpisodeSoFar | None = None


class TrajectoryLost(Message, frozen=True):
    """A launched trajectory without a completion: cancelled, not served by an engine, or nothing was sampled."""

    id: TrajectoryId
    cancelled: bool
    reason: str
    tokens: int = 0


class TrajectoryPaused(Message, frozen=True):
    """A trajectory that was paused, with ``tokens`` sampled so far. It still has its outcome."""

    id: TrajectoryId
    tokens: int


class Scored(Message, frozen=True):
    """The outcome of a trajectory that was sampled whole. ``reward_s``: since it reached the reward stage."""

    outcome: ScoredTrajectory | RewardFailure
    reward_s: float = 0.0


EndedOutcome = Scored | TrajectoryLost
TrajectoryOutcome = EndedOutcome | TrajectoryPaused
"""What is heard of a trajectory: how it ended, once, and before that each time that it was paused."""


class RolloutStatistics(Record, frozen=True):
    """``busy_seconds``: integral of running trajectories over time, no more than the capacity at once;
    ``working_seconds``: time in which one ran; both without pauses of all engines. ``environment``: those in
    their environment; ``environment_seconds``: their integral, of no more than the free slots. ``verified_tokens``: of
    deferred completions, that were kept; ``accepted_tokens`` of them the new weights chose, too: they are not decoded
    again."""

    launched: int
    finished: int
    running: int
    busy_seconds: float
    generated_tokens: int
    verified_tokens: int = 0
    accepted_tokens: int = 0
    working_seconds: float = 0.0
    environment: int = 0
    environment_seconds: float = 0.0
