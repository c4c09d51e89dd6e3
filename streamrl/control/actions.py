"""Actions that control orders. The async shell carries them out in the order given; each says all that it needs."""

from __future__ import annotations

from streamrl.base.types import DropReason, Record, TrajectoryId


class Action(Record, frozen=True, tag=True):
    """Base of everything that control orders."""


class DrawPrompts(Action, frozen=True):
    """Draw ``count`` prompts from the source; the answer is ``PromptsDrawn``."""

    count: int


class LaunchGroup(Action, frozen=True):
    """Sample ``len(ids)`` trajectories of one prompt.

    ``policy_version``: the one that will sample them. ``seed_base``: the seeds are derived from it and the sample
    number, so that a prompt whose launch is replayed draws the same completions again. ``sampling``: parameters that
    differ from the recipe's."""

    group_id: int
    ids: tuple[TrajectoryId, ...]
    policy_version: int
    seed_base: int
    round_kind: str
    sampling: dict[str, int | float] = {}


class Drop(Action, frozen=True):
    """Control dropped these trajectories: forget what they have. ``abort``: some may run or be scored still; stop
    them, wherever they are."""

    ids: tuple[TrajectoryId, ...]
    reason: DropReason
    abort: bool = False


class PauseTrajectories(Action, frozen=True):
    """Stop these trajectories and keep their tokens until they are resumed or dropped."""

    ids: tuple[TrajectoryId, ...]


class ResumeTrajectories(Action, frozen=True):
    """Resume paused trajectories, from their tokens, under the live version. Other ids are ignored."""

    ids: tuple[TrajectoryId, ...]


class PauseEngines(Action, frozen=True):
    """Pause all engines until ``policy_version`` is live, so that everything launched meanwhile is sampled by it."""

    policy_version: int


class Decision(Action, frozen=True):
    """Decision of control and its reason, for people: logged and shown. ``figures``: what it rests on."""

    subject: str
    reason: str
    figures: dict[str, float] = {}


class TrainGroupNow(Action, frozen=True):
    """Hand a ready group to training, as part of batch ``batch_id``. It may be trained on at once. ``temperature``:
    that sampled it, where it is not the recipe's."""

    batch_id: int
    group_id: int
    ids: tuple[TrajectoryId, ...]
    round_kind: str = ""
    temperature: float | None = None


class StepOptimizer(Action, frozen=True):
    """Close the batch: the trainer steps and holds ``policy_version`` afterwards. ``batches``: that are closed at once,
    as a long round may; ``engines_idle``: nothing is sampled until then; ``last``: nor after it. ``steps``: of the run,
    with which the schedule ends; ``learning_rate``: where it is not the recipe's."""

    batch_id: int
    policy_version: int
    groups: int
    samples: int
    trained_tokens: int
    batches: int = 1
    engines_idle: bool = False
    round_kind: str = ""
    last: bool = False
    steps: int = 0
    learning_rate: float | None = None


class PublishWeights(Action, frozen=True):
    """Make ``policy_version`` live on every engine (one transaction); the answer is ``WeightsLive``. ``last``: nothing
    will be sampled by it for training."""

    policy_version: int
    last: bool = False


class Evaluate(Action, frozen=True):
    """Score held-out prompts under ``policy_version``; ``limit`` 0 means all. The answer is ``EvaluationDone``."""

    policy_version: int
    limit: int


class CancelEvaluation(Action, frozen=True):
    """End the evaluation that runs, without a figure; ``EvaluationDone`` still answers."""

    policy_version: int


class WriteCheckpoint(Action, frozen=True):
    """Write trainer state and a Hugging Face directory; the answer is ``CheckpointDone``."""

    policy_version: int


class End(Action, frozen=True):
    """The last action. ``reason``: everything is done and nothing is in flight; ``error``: the data went wrong beyond
    what the recipe allows."""

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
