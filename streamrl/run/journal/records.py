"""Records of a run's journal: control's events, and what they are about. Pure.

A record of a trajectory or of prompts comes before the event that tells control of them, so that whatever control knows
has its content behind it. Nothing of an evaluation is kept: it is done again from its start, or, where engines hold a
newer version by then, given up with a warning."""

from __future__ import annotations

import msgspec

from streamrl.base.errors import StreamRLError, WireError
from streamrl.base.messages import ReturnedCall
from streamrl.base.stage_messages import EpisodeSoFar, SampledSoFar, TurnSoFar
from streamrl.base.types import (
    EnvironmentResult,
    FinishReason,
    Prompt,
    Record,
    RewardCall,
    ScoredTrajectory,
    Segment,
    Trajectory,
    TrajectoryId,
)
from streamrl.buffers.trajectory_store import Content
from streamrl.comm.wire import Buffer, OneFrameCodec
from streamrl.control.actions import Decision
from streamrl.control.events import ControlEvent
from streamrl.control.model import Snapshot

JOURNAL_SCHEMA = 4


class JournalBase(Record, frozen=True, tag=True):
    """Begin of a segment: control as it was after ``events`` events, ``elapsed_s`` after the start of the run."""

    control: Snapshot
    events: int
    elapsed_s: float
    schema: int


class JournalEvent(Record, frozen=True, tag=True):
    """``event`` happened, ``time_s`` after the start of the run."""

    event: ControlEvent
    time_s: float


class JournalDecision(Record, frozen=True, tag=True):
    """Reason for which engines were freed or changed: for people, control does not know of it."""

    decision: Decision
    time_s: float


class JournalPrompt(Record, frozen=True, tag=True):
    """A prompt that was drawn."""

    prompt: Prompt


class JournalPaused(Record, frozen=True, tag=True):
    """A trajectory was cut and keeps what it has."""

    id: TrajectoryId
    done: SampledSoFar


class JournalTurn(Record, frozen=True, tag=True):
    """Turn ``number`` of an episode, in place of it and of all after it."""

    id: TrajectoryId
    number: int
    turn: TurnSoFar


class JournalCall(Record, frozen=True, tag=True):
    """A call of a tool that has returned."""

    id: TrajectoryId
    call: ReturnedCall


class JournalSampled(Record, frozen=True, tag=True):
    """A trajectory that is whole, on its way to its reward. Its prompt is among the prompts."""

    id: TrajectoryId
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    rollout_seconds: float
    environment: EnvironmentResult | None = None


class JournalScored(Record, frozen=True, tag=True):
    """The reward of a trajectory that was sampled."""

    id: TrajectoryId
    reward: float
    reward_parts: dict[str, float] = {}
    reward_seconds: float = 0.0
    calls: tuple[RewardCall, ...] = ()
    reward_version: int = 0
    separate_rewards: dict[str, tuple[float, float]] = {}
    turn_rewards: tuple[float, ...] = ()


class JournalPublished(Record, frozen=True, tag=True):
    """State hash of what ranks published as ``policy_version``."""

    policy_version: int
    state_hash: int


JournalRecord = (
    JournalBase
    | JournalEvent
    | JournalDecision
    | JournalPrompt
    | JournalPaused
    | JournalTurn
    | JournalCall
    | JournalSampled
    | JournalScored
    | JournalPublished
)


class JournalCodec:
    """Records to bytes and back, each in one piece."""

    def __init__(self) -> None:
        self._codec: OneFrameCodec[JournalRecord] = OneFrameCodec(JournalRecord)

    def encode(self, record: JournalRecord) -> bytes:
        """The bytes of ``record``."""
        return self._codec.encode(record)

    def decode(self, body: Buffer) -> JournalRecord:
        """The record of ``body``. Raises ``StreamRLError`` where another streamrl wrote it."""
        try:
            record = self._codec.decode(body)
        except WireError as error:
            raise StreamRLError(
                f"a record of the journal cannot be read: {error}; use the streamrl that wrote it"
            ) from error
        if isinstance(record, JournalBase) and record.schema != JOURNAL_SCHEMA:
            schemas = f"schema {record.schema}, this streamrl reads {JOURNAL_SCHEMA}"
            raise StreamRLError(f"the journal has {schemas}: use the streamrl that wrote it")
        return record


def sampled_record(trajectory: Trajectory) -> JournalSampled:
    """``trajectory`` without its prompt."""
    return JournalSampled(
        id=trajectory.id,
        segments=trajectory.segments,
        finish_reason=trajectory.finish_reason,
        rollout_seconds=trajectory.rollout_seconds,
        environment=trajectory.environment,
    )


def scored_record(scored: ScoredTrajectory) -> JournalScored:
    """Return what its reward adds to a trajectory."""
    fields = {name: getattr(scored, name) for name in JournalScored.__struct_fields__ if name != "id"}
    return JournalScored(id=scored.trajectory.id, **fields)


def content_records(identity: TrajectoryId, content: Content) -> list[JournalRecord]:
    """All that brings ``content`` of a trajectory back."""
    if isinstance(content, SampledSoFar):
        return [JournalPaused(id=identity, done=content)]
    if isinstance(content, EpisodeSoFar):
        turns = [JournalTurn(id=identity, number=number, turn=turn) for number, turn in enumerate(content.turns)]
        return [*turns, *(JournalCall(id=identity, call=call) for call in content.returned)]
    if isinstance(content, ScoredTrajectory):
        return [sampled_record(content.trajectory), scored_record(content)]
    return [sampled_record(content)]


def trajectory_of(sampled: JournalSampled, prompt: Prompt) -> Trajectory:
    """The inverse of ``sampled_record``."""
    return Trajectory(prompt=prompt, **msgspec.structs.asdict(sampled))


def scored_trajectory(trajectory: Trajectory, scored: JournalScored) -> ScoredTrajectory:
    """The inverse of ``scored_record``."""
    fields = {name: getattr(scored, name) for name in JournalScored.__struct_fields__ if name != "id"}
    return ScoredTrajectory(trajectory=trajectory, **fields)
