"""Messages between control and the episodes, about one trajectory: its launch, and its outcome. Both ends are in the
controller's process: control launches a trajectory (``run.controller``; ``run.evaluate`` for held-out prompts), a
coroutine of ``stages.episodes`` samples it and has it scored. Every launched trajectory has exactly one outcome:
scored, failed, or lost. None of these messages travels to another process. ``SampledSoFar``, ``TurnSoFar`` and the
content of ``EpisodeSoFar`` are also written to the journal, from which a restarted controller reads them."""

from __future__ import annotations

from streamrl.base.messages import Message, ReturnedCall
from streamrl.base.types import (
    Completion,
    Prompt,
    Record,
    RewardFailure,
    ScoredTrajectory,
    Texts,
    TokenArray,
    Trajectory,
    TrajectoryId,
)


class SampledSoFar(Record, frozen=True):
    """Tokens of a trajectory's first turn that were sampled before a pause or a restart. Made by ``stages.episodes``
    and by ``buffers.trajectory_store``; taken by the journal and by ``LaunchTrajectory``.

    ``completion``: the tokens; its finish reason is abort unless the turn is complete;
    ``parts``: number of requests that sampled them;
    ``seconds``: time of these requests in the engines."""

    completion: Completion
    parts: int
    seconds: float


class TurnSoFar(Record, frozen=True):
    """A complete turn of an episode that has not ended. Made by ``stages.episodes``, taken by the journal.

    ``appended``, ``after``, ``stop``: arguments of the episode's request for the turn, as in ``messages.TurnRequest``;
    ``completion``: the sampled tokens;
    ``seconds``: time of the turn in the engines;
    ``is_capped``: whether the request had a lower limit of tokens than the recipe."""

    appended: TokenArray
    after: int | None
    completion: Completion
    seconds: float
    stop: Texts = ()
    is_capped: bool = False


class EpisodeSoFar(Record, frozen=True):
    """Turns of an episode that has not ended, and its tool calls that have returned. Made by
    ``buffers.trajectory_store``, taken by ``LaunchTrajectory``."""

    turns: tuple[TurnSoFar, ...] = ()
    returned: tuple[ReturnedCall, ...] = ()


class LaunchTrajectory(Message, frozen=True):
    """Sample one trajectory. Made by control, taken by ``stages.episodes``.

    ``group_size``: number of trajectories of the same prompt;
    ``seed``: seed derived from the identity of the trajectory;
    ``evaluation``: whether the prompt is held out;
    ``sampling``: sampling parameters that differ from the run's.

    At most one of the last three has content: where the controller was restarted and its journal has tokens of the
    trajectory. ``completion_so_far``: tokens of the first turn; a complete turn goes on to its reward.
    ``sampled_trajectory``: complete trajectory of an environment, which goes on to its reward. ``episode_so_far``:
    turns of an episode, which begins again and gets these turns when it requests them."""

    id: TrajectoryId
    prompt: Prompt
    group_size: int
    seed: int
    evaluation: bool = False
    sampling: dict[str, int | float] = {}
    completion_so_far: SampledSoFar | None = None
    sampled_trajectory: Trajectory | None = None
    episode_so_far: EpisodeSoFar | None = None


class TrajectoryLost(Message, frozen=True):
    """Outcome of a trajectory without a completion: cancelled, refused by the engines, or nothing was sampled. Made by
    ``stages.episodes``, taken by control. ``tokens``: number of tokens that were sampled."""

    id: TrajectoryId
    cancelled: bool
    reason: str
    tokens: int = 0


class TrajectoryPaused(Message, frozen=True):
    """Notice that a trajectory is paused, with ``tokens`` sampled so far; its outcome follows later. Made by
    ``stages.episodes``, taken by control."""

    id: TrajectoryId
    tokens: int


class Scored(Message, frozen=True):
    """Outcome of a complete trajectory: its reward, or the failure of its reward. Made by ``stages.reward`` (by
    ``stages.episodes`` where the environment failed), taken by control. ``reward_s``: seconds in the reward stage."""

    outcome: ScoredTrajectory | RewardFailure
    reward_s: float = 0.0


EndedOutcome = Scored | TrajectoryLost
TrajectoryOutcome = EndedOutcome | TrajectoryPaused
"""Reports on a trajectory: one outcome, and before it one ``TrajectoryPaused`` for each pause."""


class RolloutStatistics(Record, frozen=True):
    """Counters of ``stages.episodes`` since its start, read by the report of a step and by the watchdog.

    ``launched``, ``finished``: numbers of trajectories;
    ``running``: trajectories of which an engine samples a turn now;
    ``busy_seconds``: integral of ``running`` over time, at most the capacity of the engines at any moment;
    ``generated_tokens``: tokens that the engines decoded;
    ``verified_tokens``: tokens of deferred completions that the engines verified;
    ``accepted_tokens``: verified tokens that the new weights chose, too, and that need not be decoded again;
    ``working_seconds``: time during which at least one trajectory ran;
    ``environment``: trajectories that are in their environment now;
    ``environment_seconds``: integral of ``environment`` over time, at most the free capacity at any moment.

    ``busy_seconds`` and ``working_seconds`` leave out pauses of all engines."""

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
