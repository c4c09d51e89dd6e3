"""Messages about rewards. The first half are changes of a run's rewards: requests from the supervisor to the
controller, and the controller's answers on ``steps``. The owner of the ``Pipeline`` makes such changes, and so do
clients of the control socket (``control_protocol``). The second half are orders of the reward stage (controller) to a
reward worker, and the worker's results."""

from __future__ import annotations

from streamrl.base.messages import Message
from streamrl.base.types import (
    FinishReason,
    FloatArray,
    Prompt,
    Record,
    RewardCall,
    RewardFailureKind,
    Texts,
    WeightedRewards,
)
from streamrl.recipe.rewards import Reward


class AttachReward(Message, frozen=True):
    """Request to score with one more function."""

    reward: Reward
    request_id: int = 0


class ReplaceReward(Message, frozen=True):
    """Request to score with another function in place of the reward ``name``."""

    name: str
    reward: Reward
    request_id: int = 0


class DetachReward(Message, frozen=True):
    """Request to score without the reward ``name``."""

    name: str
    request_id: int = 0


class ListRewards(Message, frozen=True):
    """Request to list the attached rewards. It waits for the changes that were requested before it."""

    request_id: int = 0


RewardChange = AttachReward | ReplaceReward | DetachReward
RewardRequest = RewardChange | ListRewards


class RewardsChanged(Message, frozen=True):
    """Answer to a change. ``reward_version``: version of the rewards from now on; ``rewards``: names of the attached
    rewards; ``problems``: reasons why nothing has changed (empty: the change is made)."""

    request_id: int
    reward_version: int
    rewards: Texts = ()
    problems: Texts = ()


class AttachedReward(Record, frozen=True):
    """A reward that scores, without its options. ``since``: version of the rewards that brought it."""

    name: str
    function: str
    weight: float
    shadow: bool
    trusted: bool
    since: int


class RewardsListed(Message, frozen=True):
    """Answer to ``ListRewards``."""

    request_id: int
    reward_version: int
    rewards: tuple[AttachedReward, ...] = ()


RewardReply = RewardsChanged | RewardsListed


# ---- reward stage <-> reward worker --------------------------------------------------------------


class CompletionToScore(Record, frozen=True, array_like=True):
    """Part of a trajectory that a reward may read.

    ``prompt``: index of its prompt among the prompts of the message; ``token_ids``: tokens that the policy sampled (all
    trained segments, joined), as int32 in the byte order of this machine; ``environment_reward``: reward that its
    environment returned; ``turns``: number of tokens of each turn (empty: the completion has one turn);
    ``tool_calls``: number of tool calls that the model wrote. Logprobs, version spans and the turns of an environment
    are not sent: no reward reads them."""

    prompt: int
    group_id: int
    sample: int
    token_ids: bytes
    finish_reason: FinishReason
    attempt: int = 0
    environment_reward: float | None = None
    turns: tuple[int, ...] = ()
    tool_calls: int = 0


class ScoreGroup(Record, frozen=True, array_like=True):
    """Order to score completions; several where a function scores whole groups. ``reward_version``: version of the set
    of functions that scores; ``rank``: rank of the order among those that wait, the smallest begins first."""

    order_id: int
    completions: tuple[CompletionToScore, ...]
    reward_version: int = 0
    rank: int = 0


class ScoreGroups(Message, frozen=True):
    """Orders that the reward stage gathered since its last message, the smallest rank first. Each group is answered
    when it is scored. ``prompts``: prompts of all groups, each once."""

    groups: tuple[ScoreGroup, ...]
    prompts: tuple[Prompt, ...]


class LoadRewardSet(Message, frozen=True):
    """Order to load a set of functions beside the loaded sets, for which more orders may still come."""

    reward_version: int
    rewards: tuple[Reward, ...]


class CloseRewardSet(Message, frozen=True):
    """Order to close the functions of a version once its orders are answered: no more orders of this version come."""

    reward_version: int


class RememberLimits(Message, frozen=True):
    """Seconds of the slowest correct calls by reward and key, as other workers and predecessors of this worker observed
    them. Functions of ``reward_version`` are loaded when it is sent."""

    reward_version: int
    slowest_s: dict[str, dict[str, float]]


RewardOrder = ScoreGroups | LoadRewardSet | CloseRewardSet | RememberLimits


class RewardWorkerReady(Message, frozen=True):
    """First message of a reward worker, and of each successor after a restart."""

    worker: int


class SampleReward(Record, frozen=True):
    """Reward of one trajectory, or its failure; the reward stage still has the trajectory itself.

    ``parts``: values of the functions and of their named parts, without weights; ``seconds``: longest call, with its
    wait; ``kind``: kind of the failure, None for a reward; ``function``, ``message`` and ``policy``: fields of
    ``RewardFailure``; ``separate``: weight and value of each function by its name, where values are compared
    separately; ``environment_weight``: weight in ``reward`` of the reward that the environment returned;
    ``token_values``: numbers of functions that give them to steps or tokens."""

    reward: float = 0.0
    parts: dict[str, float] = {}
    seconds: float = 0.0
    calls: tuple[RewardCall, ...] = ()
    kind: RewardFailureKind | None = None
    function: str = ""
    message: str = ""
    policy: str = ""
    separate: WeightedRewards = {}
    environment_weight: float = 0.0
    token_values: dict[str, FloatArray] = {}


class GroupScored(Record, frozen=True, array_like=True):
    """Answer to a ``ScoreGroup``, with one reward or failure for each of its completions, in the same order."""

    order_id: int
    rewards: tuple[SampleReward, ...]


class GroupsScored(Message, frozen=True):
    """Groups scored since the last message. ``notice``: warning about the completions for the user of the run."""

    groups: tuple[GroupScored, ...]
    notice: str = ""


class RewardSetLoaded(Message, frozen=True):
    """Answer to ``LoadRewardSet``. ``problems``: reasons why the set cannot be used; nothing of it is loaded then."""

    reward_version: int
    per_group: bool = False
    problems: Texts = ()


class LimitsLearnt(Message, frozen=True):
    """Seconds of correct calls that were slower than all before them, by reward and key."""

    reward_version: int
    slowest_s: dict[str, dict[str, float]]


RewardResult = RewardWorkerReady | GroupsScored | RewardSetLoaded | LimitsLearnt
