"""Events that control is given. They carry identities and sizes, never tokens: a log stays small and replays
anywhere."""

from __future__ import annotations

from typing import Any, Literal

from streamrl.base.types import DropReason, FinishReason, Record, TrajectoryId


class Event(Record, frozen=True, tag=True):
    """Base of everything that happens to control."""


class RunBegan(Event, frozen=True):
    """Engines and trainer hold ``policy_version``, and it is live. Above 0: the run goes on from a checkpoint.
    ``steps``: that it is to make (0: as its settings say)."""

    policy_version: int = 0
    steps: int = 0


class PromptsDrawn(Event, frozen=True):
    """The answer to ``DrawPrompts``. Fewer than asked for means that the source is exhausted. ``prompt_tokens``: length
    of each prompt, or empty."""

    prompt_ids: tuple[str, ...]
    exhausted: bool = False
    prompt_tokens: tuple[int, ...] = ()


class TrajectoryScored(Event, frozen=True):
    """A trajectory was sampled and its reward is a value that the user's function returned. ``reward_version``: of the
    set of functions that did it; ``separate_rewards``: by name, those that are compared with their siblings' alone,
    where any are; ``seconds``: of engine and reward, from launch to score."""

    id: TrajectoryId
    reward: float
    tokens: int
    finish_reason: FinishReason
    oldest_version: int
    newest_version: int
    reward_version: int = 0
    separate_rewards: dict[str, float] = {}
    seconds: float = 0.0


class TrajectoryFailed(Event, frozen=True):
    """A trajectory ends without a reward (``reward_failed``, ``engine_failed`` or ``cancelled``). ``policy``: what the
    recipe wants then; empty: that the sample is dropped."""

    id: TrajectoryId
    reason: DropReason
    message: str = ""
    tokens: int = 0
    policy: str = ""
    reward_version: int = 0


class EnginesMeasured(Event, frozen=True):
    """Load of the engines since the last such event; reported at most a few times a second, and only if a policy asks.
    ``running``: mean number of running requests; ``token_s``: seconds of one decode step at that number (0: unknown).
    ``kv_usage``: largest share of an engine's KV blocks in use. ``environment``: trajectories that are in their
    environments now, and hold no engine slot."""

    running: float
    waiting: int
    token_s: float
    kv_usage: float
    preemptions: int
    environment: int = 0


class RoundTimed(Event, frozen=True):
    """Wall time of the step that made ``policy_version``, in seconds: until its batch was full; from there until it was
    trained; the push."""

    policy_version: int
    rollout_s: float
    training_s: float
    push_s: float


class RoundsAdvised(Event, frozen=True):
    """Prediction of an adviser beside the run: trained tokens a second of each kind of round that it compared, by name.
    ``seconds``: of a step, by name and by what metrics call the round; ``figures``: what the prediction rests on."""

    goodput: dict[str, float]
    seconds: dict[str, dict[str, float]] = {}
    figures: dict[str, float] = {}


class BatchTrained(Event, frozen=True):
    """The trainer stepped: it now holds ``policy_version``."""

    batch_id: int
    policy_version: int


class WeightsLive(Event, frozen=True):
    """Every engine acknowledged ``policy_version``."""

    policy_version: int


class EvaluationDone(Event, frozen=True):
    """Held-out prompts were scored under ``policy_version``, or their evaluation was cancelled and nothing is left."""

    policy_version: int


class CheckpointDone(Event, frozen=True):
    """A checkpoint of ``policy_version`` is on disk."""

    policy_version: int


class StopRequested(Event, frozen=True):
    """Drain: train nothing new, keep what is trained, end."""

    reason: str


class RunContinued(Event, frozen=True):
    """Somebody asked a run that had ended, or was ending, to go on: a drain that was asked for before is over.
    ``steps``: that it is to make in all from now on (0: as before)."""

    steps: int = 0


class Steered(Event, frozen=True):
    """Somebody asked for something: ``pause`` (nothing is launched until ``continue``), or an evaluation or a
    checkpoint of the live version, as soon as the state allows it."""

    order: Literal["pause", "continue", "evaluate", "checkpoint"]


class SettingsChanged(Event, frozen=True):
    """Somebody changed ``values`` of the recipe, by key (``control.steering``). They hold from the batch of ``step`` on
    (0: the next one that opens). ``recipe_steps``: ``run.steps`` of the recipe, where that changes."""

    values: dict[str, Any]
    step: int = 0
    recipe_steps: int = 0


Outcome = TrajectoryScored | TrajectoryFailed
Answer = PromptsDrawn | CheckpointDone | EvaluationDone | BatchTrained | WeightsLive
"""Answers to an order, each of which control waits for (``Pending.awaits``), in the order in which a deterministic run
takes them."""
Measurement = EnginesMeasured | RoundTimed | RoundsAdvised

ControlEvent = RunBegan | RunContinued | Steered | SettingsChanged | Outcome | Answer | Measurement | StopRequested
