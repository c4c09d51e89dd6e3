"""What travels between control, rollout and reward inside the controller: control -> rollout -> reward -> control; and
between the reward stage and its workers: ``RewardOrder`` there, ``RewardResult`` back.

Every trajectory that is launched comes back exactly once: scored, failed, or lost.
"""

from __future__ import annotations

from streamrl.base.messages import Message
from streamrl.base.types import (
    Completion,
    FinishReason,
    Prompt,
    Record,
    RewardCall,
    RewardFailure,
    RewardFailureKind,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
)
from streamrl.recipe.rewards import Reward


class SampledSoFar(Record, frozen=True):
    """What a trajectory has: ``completion``, whose finish reason is abort unless it is whole; sampled in ``parts``
    requests, during which it was in the engines for ``seconds``."""

    completion: Completion
    parts: int
    seconds: float


class LaunchTrajectory(Message, frozen=True):
    """Sample one trajectory. ``group_size`` siblings share ``prompt``; ``seed`` is derived from its identity. ``done``:
    what it had in an earlier life of the controller; one that is whole goes on to its reward."""

    id: TrajectoryId
    prompt: Prompt
    group_size: int
    seed: int
    evaluation: bool = False
    temperature: float | None = None
    done: SampledSoFar | None = None


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
    """A trajectory that was stopped with ``tokens`` sampled so far, which are in ``done`` (None: nothing). It comes
    back once more: finished or lost."""

    id: TrajectoryId
    tokens: int
    done: SampledSoFar | None = None


RolloutOutcome = FinishedTrajectory | TrajectoryLost | TrajectoryHeld


class Scored(Message, frozen=True):
    """The outcome of one trajectory, on its way back to control. ``reward_s``: since it reached the reward stage."""

    outcome: ScoredTrajectory | RewardFailure
    reward_s: float = 0.0


RewardOutcome = Scored | TrajectoryLost | TrajectoryHeld
EndedOutcome = Scored | TrajectoryLost
"""What a trajectory comes back as in the end. Held-out ones are never held."""


class RolloutStatistics(Record, frozen=True):
    """``busy_seconds``: integral of running trajectories over time, no more than the capacity at once, for the bubble
    ratio. ``verified_tokens``: of deferred completions, that were kept; ``accepted_tokens`` of them the new weights
    chose, too, and they were not decoded again."""

    launched: int
    finished: int
    running: int
    busy_seconds: float
    generated_tokens: int
    verified_tokens: int = 0
    accepted_tokens: int = 0


# ---- reward stage <-> reward worker --------------------------------------------------------------


class CompletionToScore(Record, frozen=True, array_like=True):
    """What a reward may read of a trajectory. ``prompt``: its place among the prompts of the message; ``token_ids``:
    int32 in the byte order of this machine, what the policy sampled (all trained segments, joined). Logprobs, version
    spans and the turns of an environment stay behind: no reward reads them."""

    prompt: int
    group_id: int
    sample: int
    token_ids: bytes
    finish_reason: FinishReason
    attempt: int = 0


class ScoreGroup(Record, frozen=True, array_like=True):
    """Score these completions; more than one where a function scores whole groups. ``reward_version``: which set of
    functions does it. ``rank``: of several that wait, the smallest goes first."""

    order_id: int
    completions: tuple[CompletionToScore, ...]
    reward_version: int = 0
    rank: int = 0


class ScoreGroups(Message, frozen=True):
    """What has come together since the last message, best rank first. Each group is answered when it is scored;
    ``prompts``: of all of them, each once."""

    groups: tuple[ScoreGroup, ...]
    prompts: tuple[Prompt, ...]


class LoadRewardSet(Message, frozen=True):
    """Load a set of functions beside the ones that are there. Orders of an older version may still be on their way."""

    reward_version: int
    rewards: tuple[Reward, ...]


class CloseRewardSet(Message, frozen=True):
    """No more orders of this version will come: end it once those that came are answered."""

    reward_version: int


class RememberLimits(Message, frozen=True):
    """Slowest correct calls so far, in seconds, by reward and key: of other workers, and of this one before it was
    replaced. For functions of this version, which are loaded."""

    reward_version: int
    slowest_s: dict[str, dict[str, float]]


RewardOrder = ScoreGroups | LoadRewardSet | CloseRewardSet | RememberLimits


class RewardWorkerReady(Message, frozen=True):
    """First message of a reward worker (again after a restart)."""

    worker: int


class SampleReward(Record, frozen=True):
    """The reward of one trajectory, which the stage still has; or ``kind``: it failed (see ``RewardFailure``)."""

    reward: float = 0.0
    parts: dict[str, float] = {}
    seconds: float = 0.0
    calls: tuple[RewardCall, ...] = ()
    kind: RewardFailureKind | None = None
    function: str = ""
    message: str = ""
    policy: str = ""
    separate: dict[str, tuple[float, float]] = {}


class GroupScored(Record, frozen=True, array_like=True):
    """One reward or failure for each trajectory of the order, in the same order."""

    order_id: int
    rewards: tuple[SampleReward, ...]


class GroupsScored(Message, frozen=True):
    """What was scored since the last message."""

    groups: tuple[GroupScored, ...]


class RewardSetLoaded(Message, frozen=True):
    """Answer to ``LoadRewardSet``. ``problems``: why it cannot be used; it is as if it had never come."""

    reward_version: int
    per_group: bool = False
    problems: tuple[str, ...] = ()


class LimitsLearnt(Message, frozen=True):
    """Correct calls of functions of this version that were slower than all before, in seconds, by reward and key."""

    reward_version: int
    slowest_s: dict[str, dict[str, float]]


RewardResult = RewardWorkerReady | GroupsScored | RewardSetLoaded | LimitsLearnt
