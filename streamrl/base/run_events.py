"""The items of the ``steps`` stream: what a run reports to its parent, and the parent to its observers; its orders to
the supervisor, which owns the processes; answers to changes of rewards."""

from __future__ import annotations

from msgspec import Struct, structs

from streamrl.base.messages import Message


class StartProgress(Message, frozen=True):
    """State of ``process`` (or several, with commas) while the run starts: ``starting`` or ``ready``. ``phases``: work
    that each does now, by its name, where it has noted any."""

    process: str
    state: str
    seconds: float
    phases: dict[str, str] = {}


class RunStarted(Message, frozen=True):
    """Every process is ready. ``policy_version``: the step that the run goes on from, 0 unless it was resumed.
    ``trained_parameters``: those of adapters; 0: all are trained."""

    run_id: str
    directory: str
    metrics_endpoint: str
    steps: int
    parameters: int
    policy_version: int = 0
    trained_parameters: int = 0


class RunProgress(Message, frozen=True):
    """Progress of the open round between two steps. ``phase`` is one of rollout, training, weights, evaluation."""

    step: int
    phase: str
    finished: int
    wanted: int


class StepFinished(Message, frozen=True):
    """One optimizer step whose version is live on the engines. Metric names: docs/metrics.md."""

    step: int
    policy_version: int
    metrics: dict[str, float]


class EvaluationFinished(Message, frozen=True):
    """Held-out evaluation of one version."""

    step: int
    policy_version: int
    metrics: dict[str, float]


class ShownMessage(Struct, frozen=True, omit_defaults=True):
    """A message. ``sampled``: by ``version`` at last; ``again``: it follows an earlier turn or none, not the last."""

    role: str
    text: str
    tokens: int
    sampled: bool = False
    version: int = 0
    again: bool = False


class CompletionSampled(Message, frozen=True):
    """One completion that step ``step`` trained on, or that the evaluation of its version sampled, with its ``reward``,
    and ``rewards`` by function before weights. ``sample``: its number among those of its prompt; ``chosen``: which one
    of the batch (``best``, ``worst``, ``random``; empty: all were kept). ``turns``: prompt and text by message, of a
    trajectory with an environment; empty where there are very many."""

    step: int
    prompt_id: str
    prompt: str
    text: str
    reward: float
    rewards: dict[str, float]
    tokens: int
    finish_reason: str
    sample: int = 0
    chosen: str = ""
    turns: tuple[ShownMessage, ...] = ()

    def shortened(self, most: int) -> CompletionSampled:
        """The same with at most ``most`` characters of each text, from its start and its end, where answers stand."""
        turns = tuple(structs.replace(turn, text=_shortened(turn.text, most // 4)) for turn in self.turns)
        prompt = _shortened(self.prompt, most)
        text = _shortened(self.text, most)
        return structs.replace(self, prompt=prompt, text=text, turns=turns)


def _shortened(text: str, most: int) -> str:
    mark = f" [... {len(text) - most} characters ...] "
    return text if len(text) <= most else text[: most // 2] + mark + text[-(most - most // 2) :]


class RunWarning(Message, frozen=True):
    """Alarm: a metric of ``step`` left its bounds. ``message``: the value, the bound and what to look at."""

    step: int
    message: str


class RunDecided(Message, frozen=True):
    """Control changed how it works: the kind of round, or the group size. ``figures``: what the decision rests on."""

    step: int
    subject: str
    reason: str
    figures: dict[str, float] = {}


class EngineLost(Message, frozen=True):
    """An engine died, or was ended because it made no progress; the run goes on with the others. ``requests``: those
    that it served, which are asked for elsewhere."""

    engine: str
    reason: str
    requests: int = 0


class EngineBack(Message, frozen=True):
    """An engine that was lost serves again, at the live version, ``seconds`` after it was missed."""

    engine: str
    seconds: float


class RunResumed(Message, frozen=True):
    """The run goes on where its journal ends. ``restored``: counts of what it holds (``what_was_restored``). Ranks held
    ``held_version`` and trained ``trained_again`` batches once more; ``same_weights``: whether they hold what they had
    published as that version before (None: nobody knows)."""

    policy_version: int
    restored: dict[str, int]
    held_version: int
    trained_again: int = 0
    same_weights: bool | None = None


class StallSeen(Message, frozen=True):
    """A run that has made no progress for ``seconds`` and is about to end. ``waits``: who waits for what, since when, a
    line each; ``file``: the same with the stacks of everything."""

    waits: tuple[str, ...]
    seconds: float
    file: str


class RunFinished(Message, frozen=True):
    """Last message: the run did what it should (``reason``: finished, drained, prompts exhausted)."""

    reason: str
    step: int


RunEvent = (
    StartProgress
    | RunStarted
    | RunProgress
    | StepFinished
    | EvaluationFinished
    | CompletionSampled
    | RunWarning
    | RunDecided
    | EngineLost
    | EngineBack
    | RunResumed
    | StallSeen
    | RunFinished
)


class StopEngine(Message, frozen=True):
    """The host of ``engine`` serves nothing any more, and its end is no death. It was ordered to end: the supervisor
    ends it when it has not done so after ``patience_s``. One that ``sleeps`` is not ended."""

    engine: str
    patience_s: float = 0.0
    sleeps: bool = False


class StartEngine(Message, frozen=True):
    """Start the host of ``engine`` again, which was stopped, or did not live on asleep."""

    engine: str


class KillEngine(Message, frozen=True):
    """The host of ``engine`` makes no progress (``reason``): end it as a death would, so that another is started in its
    place. Only the host that is meant: by its ``pid``, or (0: it never said one) the one that was started
    ``older_than_s`` ago or earlier."""

    engine: str
    reason: str
    pid: int = 0
    older_than_s: float = 0.0


SupervisorOrder = StopEngine | StartEngine | KillEngine
