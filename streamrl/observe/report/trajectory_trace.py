"""Trace of a run for the simulator and the calibration: ``trace.jsonl``, one JSON object a line.

The first line is a ``TraceHeader``; every other is a ``TrajectoryLine``, a ``StepLine``, an ``EnginesLine`` or an
``EventLine``, told apart by ``type``. Times (``..._s`` that name a moment) are seconds since the run began, those of
lines ascend nearly. Of a run of days the last part is there, and the one before as ``older-trace.jsonl``. Nothing is
decided from this file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.base.line_file import LineFile
from streamrl.base.types import TurnTimes

TRACE_SCHEMA = 1
TRAINED = "trained"
UNFINISHED = "unfinished"
"""Outcome of a trajectory that was under way when the run ended."""

MOST_BYTES = 1 << 30
"""Of one file: some million trajectories. Then another one is begun."""


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Base of the lines: append fields with defaults, never reuse or remove a name: readers of other versions need
    them."""


class TraceHeader(Line, frozen=True, tag="header"):
    """First line. ``recipe.toml`` beside it has what is missing here.

    ``capacity``: requests that all engines together run at once, for shares of free slots. ``kv_tokens``: tokens
    that the KV caches of all engines hold (0: unknown). ``engine_kind``: of ``simulated`` ones lengths and times say
    nothing about a model."""

    schema: int
    run_id: str
    seed: int
    max_tokens: int
    max_model_len: int
    temperature: float
    prompts_per_batch: int
    group_size: int
    rounds: str
    max_staleness: int
    engines: int
    capacity: int
    kv_tokens: int = 0
    ranks: int = 1
    parameters: int = 0
    engine_kind: str = "vllm"


class TrajectoryLine(Line, frozen=True, tag="trajectory"):
    """A trajectory that ended.

    ``outcome``: ``trained``, a ``DropReason``, or ``unfinished``. ``tokens``: sampled, also by one that was stopped;
    ``finish_reason`` is empty for such a one. ``rollout_s``: launch to last token, or to the end of its environment,
    whose ``turns`` those have that ended by themselves; ``reward_s``: in the reward
    functions; ``ended_s``: when it was trained or its end was known. ``oldest_version`` to ``newest_version``: those
    that sampled it (the launch version where that is not known). ``engine``: that had it last ("": none had it);
    ``queued_s``: launch to when an engine could sample it; ``paused_s``: outside of the engines, not in ``rollout_s``;
    ``returned_s``: when its outcome was known (0: never, or by an older streamrl)."""

    prompt_id: str
    group: int
    sample: int
    attempt: int
    prompt_tokens: int
    tokens: int
    finish_reason: str
    outcome: str
    round_kind: str
    launched_s: float
    ended_s: float
    rollout_s: float
    reward_s: float = 0.0
    reward: float | None = None
    oldest_version: int = 0
    newest_version: int = 0
    engine: str = ""
    queued_s: float = 0.0
    paused_s: float = 0.0
    returned_s: float = 0.0
    turns: tuple[TurnTimes, ...] = ()


class StepLine(Line, frozen=True, tag="step"):
    """One optimizer step whose version is live.

    ``rollout_s``: until the batch was full; ``training_s``: from there until it was trained; ``push_s``: until live;
    ``step_s``: all of it, with waits. ``forward_backward_s``: wall time of that part, wherever in the step it lay."""

    time_s: float
    policy_version: int
    round_kind: str
    group_size: float
    samples: int
    trained_tokens: int
    generated_tokens: int
    step_s: float
    rollout_s: float
    training_s: float
    push_s: float
    paused_s: float = 0.0
    forward_backward_s: float = 0.0


class EnginesLine(Line, frozen=True, tag="engines"):
    """All engines together, a few times a second.

    ``running``, ``waiting``, ``kv_usage`` (share): at ``time_s``. Since the line before: ``token_s``, mean seconds of
    one decode step (0: none was seen), while ``mean_running`` requests ran; ``generated_tokens``; ``preemptions``."""

    time_s: float
    running: int
    waiting: int
    kv_usage: float
    token_s: float = 0.0
    mean_running: float = 0.0
    generated_tokens: int = 0
    preemptions: int = 0


class EventLine(Line, frozen=True, tag="event"):
    """Something that happened, in ``step`` (the version that was live or was made). ``time_s``: its beginning;
    ``seconds``: that it lasted, of ``evaluation``, ``push``, ``pause`` (of all engines), ``paused by hand`` and
    ``checkpoint``. Other kinds: ``alarm``, ``decision``, ``setting``, ``engine lost``, ``engine back``, ``stall``,
    ``resumed``, ``drain``."""

    time_s: float
    kind: str
    text: str = ""
    step: int = 0
    seconds: float = 0.0


TraceLine = TrajectoryLine | StepLine | EnginesLine | EventLine


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A whole trace, each kind of line in the order of the file."""

    header: TraceHeader
    trajectories: tuple[TrajectoryLine, ...]
    steps: tuple[StepLine, ...]
    engines: tuple[EnginesLine, ...]
    events: tuple[EventLine, ...] = ()


class TrajectoryTrace(LineFile):
    """Appends ``TraceLine`` objects to ``path``. ``goes_on``: an earlier life of the run wrote a part already."""

    def __init__(self, path: Path, header: TraceHeader, *, goes_on: bool = False, most_bytes: int = MOST_BYTES) -> None:
        super().__init__(path, goes_on=goes_on, head=header, most_bytes=most_bytes)

    @property
    def closed(self) -> bool:
        """Return whether the run has ended, so that nothing can be appended."""
        return self._file.closed


def read_trace(path: Path, tail_bytes: int = 0) -> RecordedRun:
    """The trace in ``path``, or its header and the lines in its last ``tail_bytes`` (0: all). A last line without its
    newline (a killed run) is left out.

    Raises ``StreamRLError`` for an empty file, another schema, or a damaged line, naming it."""
    header, *lines = trace_lines(path, tail_bytes)
    if not isinstance(header, TraceHeader):
        raise StreamRLError(f"{path}: the first line is a {type(header).__name__}, not the header of a trace")
    if any(isinstance(line, TraceHeader) for line in lines):
        raise StreamRLError(f"{path}: a second header; one file holds one run")
    return RecordedRun(
        header=header,
        trajectories=tuple(line for line in lines if isinstance(line, TrajectoryLine)),
        steps=tuple(line for line in lines if isinstance(line, StepLine)),
        engines=tuple(line for line in lines if isinstance(line, EnginesLine)),
        events=tuple(line for line in lines if isinstance(line, EventLine)),
    )


def trace_lines(path: Path, tail_bytes: int = 0) -> Iterator[TraceHeader | TraceLine]:
    """The lines of a trace one by one, for files that are too large to hold. Raises as ``read_trace``."""
    decoder = msgspec.json.Decoder(TraceHeader | TraceLine)
    with path.open("rb") as file:
        number = 0
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                break
            try:
                line = decoder.decode(text)
            except UNDECODABLE as error:
                raise StreamRLError(f"{path}, line {number}: not a line of a trace: {error}") from error
            if isinstance(line, TraceHeader) and line.schema != TRACE_SCHEMA:
                raise StreamRLError(f"{path}: trace schema {line.schema}, this streamrl reads {TRACE_SCHEMA}")
            yield line
            if number == 1 and 0 < tail_bytes < os.fstat(file.fileno()).st_size - len(text):
                file.seek(-tail_bytes, os.SEEK_END)
                file.readline()  # a part of one
    if number == 0 or (number == 1 and not text.endswith(b"\n")):
        raise StreamRLError(f"{path} has no complete line: not a trace")
