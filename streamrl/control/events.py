"""Events that control takes: ``Control.handle`` receives them one at a time.

``run.controller`` makes them in the controller process and journals them, ``simulate.simulation`` makes them in virtual
time. They carry identities and sizes, never tokens, so that a journal stays small and replays anywhere."""

from __future__ import annotations

from typing import Literal

from streamrl.base.types import DropReason, FinishReason, JsonObject, Record, Texts, TrajectoryId


class Event(Record, frozen=True, tag=True):
    """Base of all events."""


class RunBegan(Event, frozen=True):
    """The run begins: engines and trainer hold ``policy_version``, and it is live. A version above 0 is that of a
    checkpoint. ``steps``: optimizer steps that the run makes in all (0: the number in its settings); ``prompts``:
    prompts after which it ends in their place (0: it ends after ``steps``; None: the number in its settings)."""

    policy_version: int = 0
    steps: int = 0
    prompts: int | None = None


class PromptsDrawn(Event, frozen=True):
    """Answer to ``DrawPrompts``. An exhausted source gives fewer prompts than ordered.

    ``prompt_tokens``: length of each prompt, or empty where lengths are not known;
    ``sets``: training set of each prompt (empty: the run has a single source);
    ``exhausted_sets``: sets that gave fewer prompts than ordered."""

    prompt_ids: Texts
    exhausted: bool = False
    prompt_tokens: tuple[int, ...] = ()
    sets: Texts = ()
    exhausted_sets: Texts = ()


class TrajectoryScored(Event, frozen=True):
    """A trajectory was sampled and the user's functions returned its reward.

    ``oldest_version``, ``newest_version``: policy versions that sampled its tokens;
    ``reward_version``: version of the set of reward functions;
    ``separate_rewards``: rewards by name, where each is compared with the same reward of the siblings alone;
    ``turn_rewards``: parts of ``reward``, by turn;
    ``signal``: whether numbers of its steps or tokens have a gradient, whatever the siblings' rewards are;
    ``seconds``: time from launch to score, in engine and reward."""

    id: TrajectoryId
    reward: float
    tokens: int
    finish_reason: FinishReason
    oldest_version: int
    newest_version: int
    reward_version: int = 0
    separate_rewards: dict[str, float] = {}
    turn_rewards: tuple[float, ...] = ()
    seconds: float = 0.0
    signal: bool = False


class TrajectoryFailed(Event, frozen=True):
    """A trajectory ended without a reward (``reward_failed``, ``engine_failed`` or ``cancelled``). ``policy``:
    ``FailurePolicy`` of the recipe; empty: only the sample is dropped."""

    id: TrajectoryId
    reason: DropReason
    message: str = ""
    tokens: int = 0
    policy: str = ""
    reward_version: int = 0


class EnginesMeasured(Event, frozen=True):
    """Load of the engines since the last such event; reported at most a few times a second, and only if a policy or
    admission asks. ``running``: mean number of running requests; ``token_s``: seconds of one decode step at that
    number (0: unknown). ``kv_usage``: largest share of an engine's KV blocks in use. ``environment``: trajectories
    that are in their environments now, and hold no engine slot. ``contexts``: tokens of the contexts of open
    trajectories, by group id, where rounds of one's own, or admission, may read them."""

    running: float
    waiting: int
    token_s: float
    kv_usage: float
    preemptions: int
    environment: int = 0
    contexts: dict[int, int] = {}


class RoundTimed(Event, frozen=True):
    """Wall time of the step that made ``policy_version``. ``rollout_s``: seconds until its batch was full;
    ``training_s``: seconds from the full batch to the end of the optimizer step; ``push_s``: seconds of the push."""

    policy_version: int
    rollout_s: float
    training_s: float
    push_s: float


class RoundsAdvised(Event, frozen=True):
    """Prediction of the adviser, which runs beside the run. ``goodput``: trained tokens a second by the name of a
    candidate; ``seconds``: seconds of a step by candidate and kind of round (its name in metrics); ``figures``: numbers
    behind the prediction."""

    goodput: dict[str, float]
    seconds: dict[str, dict[str, float]] = {}
    figures: dict[str, float] = {}


class BatchTrained(Event, frozen=True):
    """The trainer has stepped and holds ``policy_version``. ``change``: mean absolute change of a token's logprob by
    the step, where the objective tracks prompts."""

    batch_id: int
    policy_version: int
    change: float = 0.0


class WeightsLive(Event, frozen=True):
    """Every engine acknowledged ``policy_version``."""

    policy_version: int


class EvaluationDone(Event, frozen=True):
    """Held-out prompts were scored under ``policy_version``, or their evaluation was cancelled and none of them
    runs."""

    policy_version: int


class CheckpointDone(Event, frozen=True):
    """A checkpoint of ``policy_version`` is on disk."""

    policy_version: int


class StopRequested(Event, frozen=True):
    """The run shall drain: train no further batch, save, and end."""

    reason: str


class RunContinued(Event, frozen=True):
    """A user continues a run that had ended or was ending, which revokes an earlier drain. ``steps``: optimizer steps
    that the run makes in all from now on (0: as before); ``prompts``: prompts after which it ends in their place
    (0: it ends after ``steps``)."""

    steps: int = 0
    prompts: int = 0


UserOrder = Literal["pause", "continue", "evaluate", "checkpoint", "pause_engine", "withdraw_engine", "return_engine"]


class Steered(Event, frozen=True):
    """Order of a user: ``pause`` (no launches until ``continue``), an evaluation or checkpoint of the live version as
    soon as the state allows it, or an order about ``engine``, whose host needs its GPU: it serves nothing
    (``pause_engine``), has no process either (``withdraw_engine``), or serves again (``return_engine``)."""

    order: UserOrder
    engine: str = ""


class SettingsChanged(Event, frozen=True):
    """A user changed ``values`` of the recipe, by key (``control.steering``). They hold from the batch of ``step`` on
    (0: the next batch that opens). ``recipe_steps``: ``run.steps`` of the recipe, where the change concerns this
    key."""

    values: JsonObject
    step: int = 0
    recipe_steps: int = 0

    @property
    def assignments(self) -> str:
        """The values as text."""
        return ", ".join(f"{key} = {value}" for key, value in self.values.items())


Outcome = TrajectoryScored | TrajectoryFailed
Answer = PromptsDrawn | CheckpointDone | EvaluationDone | BatchTrained | WeightsLive
"""Answers to orders, which control waits for (``Pending.awaits``), in the order in which a deterministic run takes
them."""
Measurement = EnginesMeasured | RoundTimed | RoundsAdvised

ControlEvent = RunBegan | RunContinued | Steered | SettingsChanged | Outcome | Answer | Measurement | StopRequested
