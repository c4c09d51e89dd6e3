"""What control may order. The async shell carries actions out in the order given."""

from __future__ import annotations

from streamrl.types import Record, TrajectoryId


class Action(Record, frozen=True, tag=True):
    """Base of everything that control orders."""


class DrawPrompts(Action, frozen=True):
    """Draw ``count`` prompts from the source; the answer is ``PromptsDrawn``."""

    count: int


class LaunchGroup(Action, frozen=True):
    """Sample ``len(ids)`` trajectories of one prompt."""

    group_id: int
    ids: tuple[TrajectoryId, ...]


class CancelGroup(Action, frozen=True):
    """Stop these trajectories, wherever they are; forget what came back from them."""

    ids: tuple[TrajectoryId, ...]


class TrainGroupNow(Action, frozen=True):
    """Hand a ready group to training, as part of batch ``batch_id``. It may be trained on at once."""

    batch_id: int
    group_id: int
    ids: tuple[TrajectoryId, ...]


class StepOptimizer(Action, frozen=True):
    """Close the batch: the trainer steps and holds ``policy_version`` afterwards."""

    batch_id: int
    policy_version: int
    groups: int
    samples: int
    trained_tokens: int
    engines_idle: bool = False


class ForgetTrajectories(Action, frozen=True):
    """Control dropped these finished trajectories; their payload may go."""

    ids: tuple[TrajectoryId, ...]


class PublishWeights(Action, frozen=True):
    """Make ``policy_version`` live on every engine (one transaction); the answer is ``WeightsLive``."""

    policy_version: int


class Evaluate(Action, frozen=True):
    """Score held-out prompts under ``policy_version``; ``limit`` 0 means all. The answer is ``EvaluationDone``."""

    policy_version: int
    limit: int


class CancelEvaluation(Action, frozen=True):
    """End the evaluation that runs, without a figure; ``EvaluationDone`` still answers."""

    policy_version: int


class WriteCheckpoint(Action, frozen=True):
    """Write trainer state and a Hugging Face directory."""

    policy_version: int


class StopRun(Action, frozen=True):
    """End the run with an error: the data went wrong beyond what the recipe allows."""

    message: str


class FinishRun(Action, frozen=True):
    """Everything is done and nothing is in flight."""

    reason: str


ControlAction = (
    DrawPrompts
    | LaunchGroup
    | CancelGroup
    | TrainGroupNow
    | StepOptimizer
    | ForgetTrajectories
    | PublishWeights
    | Evaluate
    | CancelEvaluation
    | WriteCheckpoint
    | StopRun
    | FinishRun
)
