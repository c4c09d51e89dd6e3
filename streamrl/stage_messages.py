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


RolloutOrder = LaunchTrajectory | CancelTrajectories


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


RolloutOutcome = FinishedTrajectory | TrajectoryLost


class Scored(Message, frozen=True):
    """The outcome of one trajectory, on its way back to control."""

    outcome: ScoredTrajectory | RewardFailure


RewardOutcome = Scored | TrajectoryLost


class RolloutStatistics(Record, frozen=True):
    """``busy_seconds``: integral of running trajectories over time, for the bubble ratio."""

    launched: int
    finished: int
    running: int
    busy_seconds: float
    generated_tokens: int
