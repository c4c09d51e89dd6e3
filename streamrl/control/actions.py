"""Actions that control orders.

``Control.handle`` returns them, and its shell carries them out in this order: ``run.controller`` in the controller
process, ``simulate.simulation`` in virtual time. Each action has all data that its execution needs."""

from __future__ import annotations

from streamrl.base.types import Baseline, ClosedBatch, DropReason, Record, Texts, TrajectoryId


class Action(Record, frozen=True, tag=True):
    """Base of all actions."""


class DrawPrompts(Action, frozen=True):
    """Draw ``count`` prompts from the source; the answer is ``PromptsDrawn``. ``sets``: training set of each prompt
    (empty: the run has a single source)."""

    count: int
    sets: Texts = ()


class LaunchGroup(Action, frozen=True):
    """Sample ``len(ids)`` trajectories of one prompt.

    ``policy_version``: version that will sample them; ``seed_base``: number from which, with the sample number, seeds
    are derived, so that a prompt whose launch is replayed draws the same completions again; ``sampling``: parameters
    that differ from the recipe's."""

    group_id: int
    ids: tuple[TrajectoryId, ...]
    policy_version: int
    seed_base: int
    round_kind: str
    sampling: dict[str, int | float] = {}


class Drop(Action, frozen=True):
    """Forget these trajectories, which control has dropped. ``abort``: some may still be running or waiting for their
    reward and must be stopped."""

    ids: tuple[TrajectoryId, ...]
    reason: DropReason
    abort: bool = False


class PauseTrajectories(Action, frozen=True):
    """Stop these trajectories and keep their tokens until they are resumed or dropped."""

    ids: tuple[TrajectoryId, ...]


class ResumeTrajectories(Action, frozen=True):
    """Resume paused trajectories from their tokens under the live version. Ids that are not paused are ignored."""

    ids: tuple[TrajectoryId, ...]


class PauseEngines(Action, frozen=True):
    """Pause all engines until ``policy_version`` is live, so that it samples everything that is launched meanwhile."""

    policy_version: int


class Decision(Action, frozen=True):
    """Decision of control and its reason, logged and shown to the user. ``figures``: numbers behind the decision."""

    subject: str
    reason: str
    figures: dict[str, float] = {}


class TrainGroupNow(Action, frozen=True):
    """Hand a ready group to training as part of batch ``batch_id``. The trainer may start with it at once.
    ``temperature``: sampling temperature of the group, where it differs from the recipe's;
    ``baseline``: earlier rewards of the prompt, where the objective tracks them."""

    batch_id: int
    group_id: int
    ids: tuple[TrajectoryId, ...]
    round_kind: str = ""
    temperature: float | None = None
    baseline: Baseline | None = None


class StepOptimizer(ClosedBatch, Action, frozen=True):
    """Close the batch: the trainer steps and holds ``policy_version`` afterwards. ``last``: whether this is the last
    step of the run."""

    round_kind: str = ""
    last: bool = False


class PublishWeights(Action, frozen=True):
    """Make ``policy_version`` live on every engine in one transaction; the answer is ``WeightsLive``. ``last``: whether
    this version samples nothing for training any more."""

    policy_version: int
    last: bool = False


class Evaluate(Action, frozen=True):
    """Score held-out prompts under ``policy_version``; ``limit`` 0 means all. The answer is ``EvaluationDone``."""

    policy_version: int
    limit: int


class CancelEvaluation(Action, frozen=True):
    """End the running evaluation without a figure; the answer is still ``EvaluationDone``."""

    policy_version: int


class WriteCheckpoint(Action, frozen=True):
    """Write trainer state and a Hugging Face directory; the answer is ``CheckpointDone``."""

    policy_version: int


ALL_STEPS_DONE = "finished"
"""Reason of an end after the last step."""

PROMPTS_EXHAUSTED = "prompts exhausted"
"""Reason of an end without further prompts."""


class End(Action, frozen=True):
    """End the run; this is the last action. ``reason``: message for the user; ``error``: whether the run failed.
    Without an error nothing is in flight."""

    reason: str
    error: bool = False


ControlAction = (
    DrawPrompts
    | LaunchGroup
    | Drop
    | PauseTrajectories
    | PauseEngines
    | ResumeTrajectories
    | Decision
    | TrainGroupNow
    | StepOptimizer
    | PublishWeights
    | Evaluate
    | CancelEvaluation
    | WriteCheckpoint
    | End
)
