"""What travels between control, rollout and reward inside the controller: control -> rollout -> reward -> control.

Every trajectory that is launched comes back exactly once: scored, failed, or lost.
"""

from __future__ import annotations

from streamrl.messages import Message
from streamrl.types import Prompt, Record, RewardFailure, ScoredTrajectory, Trajectory, TrajectoryId


class LaunchTrajectory(Message, frozen=True):
    """Sample one trajectory. ``group_size`` siblings share ``prompt``; ``seed`` is derived from its identity."""

    id: TrajectoryId
    prompt: Prompt
    group_size: int
    seed: int
    evaluation: bool = False
    temperature: float | None = None


class CancelTrajectories(Message, frozen=True):
    """Stop these trajectories; each still ends once, as ``TrajectoryLost``."""

    ids: tuple[TrajectoryId, ...]


class HoldTrajectories(Message, frozen=True):
    """Stop these trajectories and keep their tokens until they are resumed or cancelled; each that was still running
    answers with ``TrajectoryHeld``."""

    ids: tuple[TrajectoryId, ...]


class ContinueTrajectories(Message, frozen=True):
    """Go on with held trajectories, from their tokens. Ids that are not held are ignored."""

    ids: tuple[TrajectoryId, ...]


RolloutOrder = LaunchTrajectory | CancelTrajectories | HoldTrajectories | ContinueTrajectories


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


class TrajectoryHeld(Message, frozen=True):
    """A trajectory that was stopped with ``tokens`` sampled so far. It comes back once more: finished or lost."""

    id: TrajectoryId
    tokens: int


RolloutOutcome = FinishedTrajectory | TrajectoryLost | TrajectoryHeld


class Scored(Message, frozen=True):
    """The outcome of one trajectory, on its way back to control."""

    outcome: ScoredTrajectory | RewardFailure


RewardOutcome = Scored | TrajectoryLost | TrajectoryHeld
EndedOutcome = Scored | TrajectoryLost
"""What a trajectory comes back as in the end. Held-out ones are never held."""


class RolloutStatistics(Record, frozen=True):
    """``busy_seconds``: integral of running trajectories over time, for the bubble ratio."""

    launched: int
    finished: int
    running: int
    busy_seconds: float
    generated_tokens: int
