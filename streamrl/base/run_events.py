"""Events of a run, and orders about its engines. The controller sends both to the supervisor (the process of the
command) on the ``steps`` stream.

Events (``RunEvent``) go on to the terminal, to ``contracts.Sink`` objects and to ``Pipeline``'s caller; the controller
also writes several of them to ``metrics.jsonl``, ``samples.jsonl``, the trace and the metrics socket, so the names of
their fields are fixed. Orders (``SupervisorOrder``) start and end engine processes."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.messages import Message
from streamrl.base.types import Metrics, Texts, TextsByName

WORDS = 60
"""Characters of a prompt beside its id."""


class StartProgress(Message, frozen=True):
    """Progress of a process while the run starts.

    ``process``: name of a process, or several names with commas;
    ``state``: ``starting`` or ``ready``;
    ``seconds``: time since the start;
    ``phases``: present work of each process, by name (``waits.note_phase``)."""

    process: str
    state: str
    seconds: float
    phases: TextsByName = {}


class RunStarted(Message, frozen=True):
    """All processes are ready.

    ``directory``: directory of the run;
    ``metrics_endpoint``: ZeroMQ endpoint of the published metrics;
    ``steps``: length of the run;
    ``parameters``: number of parameters of the model;
    ``policy_version``: step from which the run goes on, 0 unless it was resumed;
    ``trained_parameters``: number of parameters of the adapters (0: all parameters are trained)."""

    run_id: str
    directory: str
    metrics_endpoint: str
    steps: int
    parameters: int
    policy_version: int = 0
    trained_parameters: int = 0


class RunProgress(Message, frozen=True):
    """Progress between two steps.

    ``phase``: name of the phase: rollout, training, weights or evaluation;
    ``finished``: number of finished units of the phase, such as completions;
    ``wanted``: number of all units of the phase."""

    step: int
    phase: str
    finished: int
    wanted: int


class StepFinished(Message, frozen=True):
    """One optimizer step whose version is live on the engines. docs/metrics.md lists the metrics."""

    step: int
    policy_version: int
    metrics: Metrics


class EvaluationFinished(Message, frozen=True):
    """Held-out evaluation of one version."""

    step: int
    policy_version: int
    metrics: Metrics


class ShownMessage(Struct, frozen=True, omit_defaults=True):
    """One message of a conversation in ``CompletionSampled``.

    ``role``, ``text``: role and text of the message;
    ``tokens``: number of its tokens;
    ``sampled``: whether the policy sampled the message;
    ``version``: newest policy version that sampled a token of the message;
    ``again``: whether the message continues an earlier turn or the prompt, not the turn before."""

    role: str
    text: str
    tokens: int
    sampled: bool = False
    version: int = 0
    again: bool = False


class NumberedText(Struct, frozen=True, array_like=True):
    """A ``number`` that the function ``reward`` gave to ``text``, a step or tokens of a completion."""

    reward: str
    number: float
    text: str


class CompletionSampled(Message, frozen=True):
    """One completion as text, which step ``step`` trained, or which the evaluation of this version sampled.

    ``prompt``, ``text``: texts of the prompt and the completion;
    ``question``: start of the last message of the user in the prompt (empty: the prompt is no chat);
    ``reward``: combined reward;
    ``rewards``: value of each reward function, before weights;
    ``tokens``: number of sampled tokens;
    ``sample``: number of the completion among those of its prompt;
    ``chosen``: reason to store it among the batch: ``best``, ``worst`` or ``random`` (empty: all are stored);
    ``turns``: messages of a trajectory with an environment (empty: no environment, or too many messages);
    ``numbers``: numbers that rewards gave to steps or tokens, in their order;
    ``set``: set of its prompt, where there are several."""

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
    question: str = ""
    numbers: tuple[NumberedText, ...] = ()
    set: str = ""

    def shortened(self, limit: int) -> CompletionSampled:
        """Return the event with at most ``limit`` characters of each text, from its start and its end (a quarter of it
        for each message of ``turns``)."""
        turns = tuple(replace(turn, text=_shortened(turn.text, limit // 4)) for turn in self.turns)
        prompt = _shortened(self.prompt, limit)
        text = _shortened(self.text, limit)
        question = _shortened(self.question, limit)
        return replace(self, prompt=prompt, question=question, text=text, turns=turns)


class NamedPrompt(Struct, frozen=True):
    """A line of ``prompts.jsonl``. ``words``: first ``WORDS`` characters of the question, or of a prompt that is no
    chat."""

    prompt_id: str
    words: str


def _shortened(text: str, limit: int) -> str:
    """``text`` with a mark in place of its middle where it is longer than ``limit``."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return f"{text[:head]} [... {len(text) - limit} characters ...] {text[-tail:]}"


class RunWarning(Message, frozen=True):
    """Alarm about step ``step``, such as a metric outside of its bounds. ``message``: value, bound and advice."""

    step: int
    message: str


class RunDecided(Message, frozen=True):
    """Decision of control to change the kind of round, the group size or the set of engines.

    ``subject``: name of the changed setting;
    ``reason``: sentence about the decision;
    ``figures``: measurements that the decision is based on."""

    step: int
    subject: str
    reason: str
    figures: dict[str, float] = {}


class EngineLost(Message, frozen=True):
    """An engine died, or was killed because it made no progress; the run goes on with the other engines. ``requests``:
    number of its requests, which other engines serve."""

    engine: str
    reason: str
    requests: int = 0


class EngineBack(Message, frozen=True):
    """A lost engine serves again, with the live version, ``seconds`` after ``EngineLost``."""

    engine: str
    seconds: float


class RunResumed(Message, frozen=True):
    """The run was resumed from its journal.

    ``policy_version``: version with which the run goes on;
    ``restored``: counts of the journal's content (``run.journal.recover.what_was_restored``);
    ``held_version``: version of the checkpoint that the trainer ranks loaded;
    ``trained_again``: number of batches of the journal that the ranks trained once more;
    ``same_weights``: whether the ranks have the same weights as before the restart (None: unknown)."""

    policy_version: int
    restored: dict[str, int]
    held_version: int
    trained_again: int = 0
    same_weights: bool | None = None


class StallSeen(Message, frozen=True):
    """The run has made no progress for ``seconds`` and is about to end. ``waits``: open waits, a line each (``waits``);
    ``file``: path of a file with all waits and stacks."""

    waits: Texts
    seconds: float
    file: str


class RunFinished(Message, frozen=True):
    """Last event of a run that succeeded. ``reason``: finished, drained or prompts exhausted."""

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
    """Notice that the process of ``engine`` was ordered to end, so that its end is no failure.

    ``patience_s``: seconds after which the supervisor ends the process itself;
    ``sleeps``: whether the process stays, with an engine that sleeps."""

    engine: str
    patience_s: float = 0.0
    sleeps: bool = False


class StartEngine(Message, frozen=True):
    """Start the process of ``engine``, which was stopped, or died while the engine slept."""

    engine: str


class KillEngine(Message, frozen=True):
    """Kill the process of ``engine``, which makes no progress, so that another is started in its place.

    ``reason``: reason, for the log;
    ``pid``: process id; another process of the engine is left alone (0: unknown);
    ``older_than_s``: age that the process must have where its ``pid`` is unknown."""

    engine: str
    reason: str
    pid: int = 0
    older_than_s: float = 0.0


SupervisorOrder = StopEngine | StartEngine | KillEngine
