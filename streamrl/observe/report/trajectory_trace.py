"""The trace of a run: ``trace.jsonl``, with a JSON object in each line.

``RunReport``, ``TrajectoryStats`` and ``TraceEvents`` write it in the process of the controller. The simulator, its
calibration, ``streamrl compare`` and the dashboard read it in the process of their command, and the trackers in theirs.
The run itself decides nothing from this file.

The first line is a ``TraceHeader``. Every other line is a ``TrajectoryLine``, a ``StepLine``, an ``EnginesLine`` or an
``EventLine``, as its ``type`` says. Moments are seconds since the run began, and the moments of lines ascend nearly. A
long trace is rotated: its last part is in ``trace.jsonl``, the part before in ``older-trace.jsonl``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, json

from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.base.line_file import LineFile

TRACE_SCHEMA = 1
TRAINED = "trained"
UNFINISHED = "unfinished"
"""Outcome of a trajectory that was under way when the run ended."""

Count = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 32)]
Number = Annotated[float, Meta(ge=-1e38, le=1e38)]
"""Limits of 32-bit columns. A line with a number beyond them was not written by a run, and counts as a line that cannot
be read."""
TracedTurn = tuple[Count, Number, Count, Number]
"""``TurnTimes`` with these limits."""

MOST_BYTES = 1 << 30
"""Bytes of one file, some million trajectories. A larger file is rotated."""


class Line(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Base of the lines. A new field needs a default, and no name is reused or removed: other versions of streamrl read
    the lines."""


class TraceHeader(Line, frozen=True, tag="header"):
    """First line of a trace. Everything else about the run is in ``recipe.toml`` of the same directory.

    ``capacity``: requests that all engines together run at once, for shares of free slots. ``kv_tokens``: tokens
    that the KV caches of all engines hold (0: unknown). ``engine_kind``: ``vllm`` or ``simulated``; lengths and times
    of simulated engines say nothing about a model."""

    schema: int
    run_id: str
    seed: int
    max_tokens: int
    max_model_len: int
    temperature: Number
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

    ``tokens``: number of sampled tokens, also of a stopped trajectory. ``finish_reason``: finish reason of its last
    completion; empty where the trajectory was stopped. ``outcome``: ``trained``, a ``DropReason``, or ``unfinished``.
    ``ended_s``: moment at which it was trained, or at which its end was known. ``rollout_s``: seconds from its launch
    to its last token, or to the end of its environment, without ``paused_s``. ``reward_s``: seconds in the reward
    functions. ``oldest_version`` and ``newest_version``: range of the versions that sampled it (the version of its
    launch where they are not known). ``engine``: last engine that sampled it (empty: none). ``queued_s``: seconds from
    its launch until an engine could sample it. ``paused_s``: seconds of its pauses, outside of the engines.
    ``returned_s``: moment at which its outcome was known (0: never, or an older streamrl wrote the line). ``turns``:
    times of the turns in its environment; empty where the trajectory was stopped."""

    prompt_id: str
    group: Count
    sample: Count
    attempt: Count
    prompt_tokens: Count
    tokens: Count
    finish_reason: str
    outcome: str
    round_kind: str
    launched_s: Number
    ended_s: Number
    rollout_s: Number
    reward_s: Number = 0.0
    reward: Number | None = None
    oldest_version: Count = 0
    newest_version: Count = 0
    engine: str = ""
    queued_s: Number = 0.0
    paused_s: Number = 0.0
    returned_s: Number = 0.0
    turns: tuple[TracedTurn, ...] = ()


class StepLine(Line, frozen=True, tag="step"):
    """One optimizer step whose version is live.

    ``step_s``: seconds of the whole step, with waits. ``rollout_s``: seconds until the batch was full. ``training_s``:
    seconds from then until the batch was trained. ``push_s``: seconds of the push, until the version was live.
    ``paused_s``: seconds in which the push paused the engines. ``forward_backward_s``: seconds of forward and backward
    passes, which with streaming begin before the batch is full. ``to_ranks_s``, ``to_engines_s``: the parts of
    ``training_s`` and ``push_s`` in which GPUs change hands, where engines and ranks take turns."""

    time_s: Number
    policy_version: Count
    round_kind: str
    group_size: Number
    samples: Count
    trained_tokens: Count
    generated_tokens: Count
    step_s: Number
    rollout_s: Number
    training_s: Number
    push_s: Number
    paused_s: Number = 0.0
    forward_backward_s: Number = 0.0
    to_ranks_s: Number = 0.0
    to_engines_s: Number = 0.0


class EnginesLine(Line, frozen=True, tag="engines"):
    """All engines together, a few times a second.

    ``running``, ``waiting`` and ``kv_usage`` (a share) are values at ``time_s``, the other fields are measured since
    the line before. ``token_s``: mean seconds of a decode step (0: there was none). ``mean_running``: mean number of
    requests in a decode step. ``prefilled_tokens``, ``prefill_s``: tokens of prefills, and the time of all engines by
    which they lengthened steps."""

    time_s: Number
    running: Count
    waiting: Count
    kv_usage: Number
    token_s: Number = 0.0
    mean_running: Number = 0.0
    generated_tokens: Count = 0
    preemptions: Count = 0
    prefilled_tokens: Count = 0
    prefill_s: Number = 0.0


class EventLine(Line, frozen=True, tag="event"):
    """An event of the run.

    ``time_s``: moment at which it began. ``step``: version that was live or was made. ``seconds``: duration of an event
    of the kinds ``evaluation``, ``push``, ``pause`` (of all engines), ``paused by hand`` and ``checkpoint``. The other
    kinds are ``alarm``, ``decision``, ``setting``, ``engine lost``, ``engine back``, ``stall``, ``resumed`` and
    ``drain``."""

    time_s: Number
    kind: str
    text: str = ""
    step: Count = 0
    seconds: Number = 0.0


TraceLine = TrajectoryLine | StepLine | EnginesLine | EventLine


class RecordedRun(Struct, frozen=True, kw_only=True):
    """The lines of a trace by kind, in the order of the file."""

    header: TraceHeader
    trajectories: tuple[TrajectoryLine, ...]
    steps: tuple[StepLine, ...]
    engines: tuple[EnginesLine, ...]
    events: tuple[EventLine, ...] = ()


class TrajectoryTrace(LineFile):
    """Appends ``TraceLine`` objects to ``path``. ``goes_on``: whether an earlier process of the run wrote a part
    already."""

    def __init__(self, path: Path, header: TraceHeader, *, goes_on: bool = False, most_bytes: int = MOST_BYTES) -> None:
        super().__init__(path, goes_on=goes_on, head=header, most_bytes=most_bytes)

    @property
    def closed(self) -> bool:
        """Return whether the run has ended, so that nothing can be appended."""
        return self._file.closed


def read_trace(path: Path, tail_bytes: int = 0) -> RecordedRun:
    """Return the trace in ``path``, or its header and the lines in its last ``tail_bytes`` (0: all lines). A last line
    without its newline, which a killed run leaves, is ignored.

    Raises ``StreamRLError`` for an empty file, another schema, or a damaged line, with its number."""
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


def trace_lines(path: Path, tail_bytes: int) -> Iterator[TraceHeader | TraceLine]:
    """Yield the lines of a trace, for files that are too large to hold in memory. Raises like ``read_trace``."""
    decoder = json.Decoder(TraceHeader | TraceLine)
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
                file.readline()  # the rest of a line whose start was skipped
    if number == 0 or (number == 1 and not text.endswith(b"\n")):
        raise StreamRLError(f"{path} has no complete line: not a trace")
