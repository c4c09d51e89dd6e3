"""Changes of a run's rewards: orders to the controller, and its answers on ``steps``. They are asked for by the owner
of the ``Pipeline``, and over the control socket of the run (``control_protocol``)."""

from __future__ import annotations

from streamrl.base.messages import Message
from streamrl.base.types import FinishReason, Prompt, Record, RewardCall, RewardFailureKind
from streamrl.recipe.rewards import Reward


class AttachReward(Message, frozen=True):
    """Score with this function too."""

    reward: Reward
    request_id: int = 0


class ReplaceReward(Message, frozen=True):
    """Score with this function in place of the one called ``name``."""

    name: str
    reward: Reward
    request_id: int = 0


class DetachReward(Message, frozen=True):
    """Score without the function called ``name``."""

    name: str
    request_id: int = 0


class ListRewards(Message, frozen=True):
    """Say what is attached. In turn with the changes."""

    request_id: int = 0


RewardChange = AttachReward | ReplaceReward | DetachReward
RewardRequest = RewardChange | ListRewards


class RewardsChanged(Message, frozen=True):
    """The answer to a change. ``reward_version``: what is attached from now on, by name. ``problems``: nothing has
    changed."""

    request_id: int
    reward_version: int
    rewards: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


class AttachedReward(Record, frozen=True):
    """A function that scores. ``since``: the version of the rewards that brought it. Its options stay unsaid."""

    name: str
    function: str
    weight: float
    shadow: bool
    trusted: bool
    since: int


class RewardsListed(Message, frozen=True):
    """The answer to ``ListRewards``."""

    request_id: int
    reward_version: int
    rewards: tuple[AttachedReward, ...] = ()


RewardReply = RewardsChanged | RewardsListed


# ---- reward stage <-> reward worker --------------------------------------------------------------


class CompletionToScore(Record, frozen=True, array_like=True):
    """Part of a trajectory that a reward may read. ``prompt``: its place among the prompts of the message;
    ``token_ids``: int32 in the byte order of this machine, what the policy sampled (all trained segments, joined).
    Logprobs, version spans and the turns of an environment stay behind: no reward reads them. ``environment_reward``:
    what its environment returned; ``last_turn``: tokens of the last turn (0: all are);
    ``tool_calls``: that the model wrote."""

    prompt: int
    group_id: int
    sample: int
    token_ids: bytes
    finish_reason: FinishReason
    attempt: int = 0
    environment_reward: float | None = None
    last_turn: int = 0
    tool_calls: int = 0


class ScoreGroup(Record, frozen=True, array_like=True):
    """Score these completions; more than one where a function scores whole groups. ``reward_version``: which set of
    functions does it. ``rank``: of several that wait, the smallest goes first."""

    order_id: int
    completions: tuple[CompletionToScore, ...]
    reward_version: int = 0
    rank: int = 0


class ScoreGroups(Message, frozen=True):
    """Order to score the groups that came together since the last message, best rank first. Each group is answered when
    it is scored; ``prompts``: of all of them, each once."""

    groups: tuple[ScoreGroup, ...]
    prompts: tuple[Prompt, ...]


class LoadRewardSet(Message, frozen=True):
    """Load a set of functions beside the ones that are there. Orders of an older version may still be on their way."""

    reward_version: int
    rewards: tuple[Reward, ...]


class CloseRewardSet(Message, frozen=True):
    """Order to end a version once its orders are answered: no more of them will come."""

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
    """The reward of one trajectory, which the stage still has; or ``kind``: it failed (see ``RewardFailure``).
    ``environment_weight``: of what its environment returned, in ``reward``."""

    reward: float = 0.0
    parts: dict[str, float] = {}
    seconds: float = 0.0
    calls: tuple[RewardCall, ...] = ()
    kind: RewardFailureKind | None = None
    function: str = ""
    message: str = ""
    policy: str = ""
    separate: dict[str, tuple[float, float]] = {}
    environment_weight: float = 0.0


class GroupScored(Record, frozen=True, array_like=True):
    """One reward or failure for each trajectory of the order, in the same order."""

    order_id: int
    rewards: tuple[SampleReward, ...]


class GroupsScored(Message, frozen=True):
    """Groups scored since the last message. ``notice``: what a person should know about how they were."""

    groups: tuple[GroupScored, ...]
    notice: str = ""


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
