"""Messages between control, rollout and reward inside the controller: control -> rollout -> reward -> control; and
between the reward stage and its workers: ``RewardOrder`` there, ``RewardResult`` back. Every trajectory that is
launched comes back exactly once: scored, failed, or lost."""

from __future__ import annotations

from streamrl.base.messages import Message
from streamrl.base.types import Completion, Prompt, Record, RewardFailure, ScoredTrajectory, Trajectory, TrajectoryId


class SampledSoFar(Record, frozen=True):
    """Tokens of a trajectory until now: ``completion``, whose finish reason is abort unless it is whole; sampled in
    ``parts`` requests, during which it was in the engines for ``seconds``."""

    completion: Completion
    parts: int
    seconds: float


class LaunchTrajectory(Message, frozen=True):
    """Sample one trajectory. ``group_size`` siblings share ``prompt``; ``seed`` is derived from its identity.
    ``sampling``: parameters of its requests that differ from the run's. ``done``: what it had in an earlier life of the
    controller; one that is whole goes on to its reward."""

    id: TrajectoryId
    prompt: Prompt
    group_size: int
    seed: int
    evaluation: bool = False
    sampling: dict[str, int | float] = {}
    done: SampledSoFar | None = None


class CancelTrajectories(Message, frozen=True):
    """Stop these trajectories; each still ends once, as ``TrajectoryLost``."""

    ids: tuple[TrajectoryId, ...]


class PauseTrajectories(Message, frozen=True):
    """Stop these trajectories and keep their tokens until they are resumed or cancelled; each that was still running
    answers with ``TrajectoryPaused``. Control orders it, and the rollout stage gets the same message."""

    ids: tuple[TrajectoryId, ...]


class ResumeTrajectories(Message, frozen=True):
    """Resume paused trajectories, from their tokens, under the live version. Other ids are ignored."""

    ids: tuple[TrajectoryId, ...]


RolloutOrder = LaunchTrajectory | CancelTrajectories | PauseTrajectories | ResumeTrajectories


class FinishedTrajectory(Message, frozen=True):
    """A trajectory on its way to the reward stage."""

    trajectory: Trajectory
    group_size: int


class TrajectoryLost(Message, frozen=True):
    """A launched trajectory that ends without a completion: cancelled, or the engine could not serve it."""

    id: TrajectoryId
    group_size: int
    cancelled: bool
    reason: str
    tokens: int = 0
    evaluation: bool = False


class TrajectoryPaused(Message, frozen=True):
    """A trajectory that was paused with ``tokens`` sampled so far, which are in ``done`` (None: nothing). It comes
    back once more: finished or lost."""

    id: TrajectoryId
    tokens: int
    done: SampledSoFar | None = None


RolloutOutcome = FinishedTrajectory | TrajectoryLost | TrajectoryPaused


class Scored(Message, frozen=True):
    """The outcome of one trajectory, on its way back to control. ``reward_s``: since it reached the reward stage."""

    outcome: ScoredTrajectory | RewardFailure
    reward_s: float = 0.0


RewardOutcome = Scored | TrajectoryLost | TrajectoryPaused
EndedOutcome = Scored | TrajectoryLost
"""What a trajectory comes back as in the end. Held-out ones are never paused."""


class RolloutStatistics(Record, frozen=True):
    """``busy_seconds``: integral of running trajectories over time, no more than the capacity at once;
    ``working_seconds``: time in which one ran; both without pauses of all engines. ``verified_tokens``: of deferred
    completions, that were kept; ``accepted_tokens`` of them the new weights chose, too: they are not decoded again."""

    launched: int
    finished: int
    running: int
    busy_seconds: float
    generated_tokens: int
    verified_tokens: int = 0
    accepted_tokens: int = 0
    working_seconds: float = 0.0
