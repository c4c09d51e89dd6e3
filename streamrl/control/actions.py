"""What control may order. The async shell carries actions out in the order given."""

from __future__ import annotations

from streamrl.base.types import DropReason, Record, TrajectoryId


class Action(Record, frozen=True, tag=True):
    """Base of everything that control orders."""


class DrawPrompts(Action, frozen=True):
    """Draw ``count`` prompts from the source; the answer is ``PromptsDrawn``."""

    count: int


class LaunchGroup(Action, frozen=True):
    """Sample ``len(ids)`` trajectories of one prompt.

    ``policy_version``: the one that will sample them. ``noise``: the seeds are derived from it and the sample number,
    so that a replayed loser draws the same noise again.
    """

    group_id: int
    ids: tuple[TrajectoryId, ...]
    policy_version: int
    noise: int


class CancelGroup(Action, frozen=True):
    """Stop these trajectories, wherever they are; forget what came back from them. ``reason``: for the report."""

    ids: tuple[TrajectoryId, ...]
    reason: DropReason = DropReason.CANCELLED


class CutTrajectories(Action, frozen=True):
    """Stop these trajectories and keep their tokens. Each answers with ``TrajectoryCut``, unless it ended before."""

    ids: tuple[TrajectoryId, ...]


class ResumeTrajectories(Action, frozen=True):
    """Go on with trajectories that were cut, from their tokens, under the live version."""

    ids: tuple[TrajectoryId, ...]


class HoldEngines(Action, frozen=True):
    """Pause all engines until ``policy_version`` is live: what is launched now is sampled by it."""

    policy_version: int


class Explain(Action, frozen=True):
    """Why control decided as it did, for people: written to the event log and shown. ``figures``: what it rests on."""

    subject: str
    reason: str
    figures: dict[str, float] = {}


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
    """Control dropped these finished trajectories; their payload may go. ``reason``: for the report."""

    ids: tuple[TrajectoryId, ...]
    reason: DropReason = DropReason.CANCELLED


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
    | CutTrajectories
    | ResumeTrajectories
    | HoldEngines
    | Explain
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
