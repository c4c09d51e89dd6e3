"""Records of a run's journal: control's events, and the trajectories and prompts that they name. Pure.

``run_journal`` writes them in the controller process, ``recover`` and ``summary`` read them. The record of a trajectory
or prompt comes before the event that names it, so that everything in control's state has its content in the journal.
Evaluations are not in the journal: an evaluation begins again when a run resumes, or is given up with a warning where
engines hold a newer version by then."""

from __future__ import annotations

from msgspec.structs import asdict

from streamrl.base.errors import StreamRLError, WireError
from streamrl.base.messages import ReturnedCall
from streamrl.base.stage_messages import EpisodeSoFar, SampledSoFar, TurnSoFar
from streamrl.base.types import (
    JsonObject,
    Prompt,
    Record,
    SampledTrajectory,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
    TrajectoryReward,
)
from streamrl.buffers.trajectory_store import Content
from streamrl.comm.wire import Buffer, OneFrameCodec
from streamrl.control.actions import Decision
from streamrl.control.events import ControlEvent
from streamrl.control.run_state import Snapshot

JOURNAL_SCHEMA = 4


class JournalBase(Record, frozen=True, tag=True):
    """First record of a segment: the state of control after ``events`` events, ``elapsed_s`` after the run's start."""

    control: Snapshot
    events: int
    elapsed_s: float
    schema: int


class JournalEvent(Record, frozen=True, tag=True):
    """An event, ``time_s`` after the start of the run."""

    event: ControlEvent
    time_s: float


class JournalDecision(Record, frozen=True, tag=True):
    """Reason for which engines were freed or changed. It is written for readers, and is no part of control's state."""

    decision: Decision
    time_s: float


class JournalPrompt(Record, frozen=True, tag=True):
    """A prompt that was drawn."""

    prompt: Prompt


class JournalPaused(Record, frozen=True, tag=True):
    """A paused trajectory, with the tokens that it has so far."""

    id: TrajectoryId
    done: SampledSoFar


class JournalTurn(Record, frozen=True, tag=True):
    """Turn ``number`` of an episode. It replaces an earlier record of this turn, and all turns after it."""

    id: TrajectoryId
    number: int
    turn: TurnSoFar


class JournalCall(Record, frozen=True, tag=True):
    """A call of a tool that has returned."""

    id: TrajectoryId
    call: ReturnedCall


class JournalSampled(SampledTrajectory, frozen=True, tag=True):
    """A complete trajectory before it has a reward. Its prompt is in a ``JournalPrompt``."""


class JournalScored(TrajectoryReward, frozen=True, kw_only=True, tag=True):
    """The reward of a trajectory that has a ``JournalSampled``."""

    id: TrajectoryId


class JournalPublished(Record, frozen=True, tag=True):
    """State hash of the weights that the ranks published as ``policy_version``."""

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


class JournalCodec(OneFrameCodec[JournalRecord]):
    """Encodes records as bytes, and decodes them."""

    def __init__(self) -> None:
        super().__init__(JournalRecord)

    def decode(self, body: Buffer) -> JournalRecord:
        """Return the record in ``body``. Raises ``StreamRLError`` where another version of streamrl wrote it."""
        try:
            record = super().decode(body)
        except WireError as error:
            raise StreamRLError(
                f"a record of the journal cannot be read: {error}; use the streamrl that wrote it"
            ) from error
        if isinstance(record, JournalBase) and record.schema != JOURNAL_SCHEMA:
            schemas = f"schema {record.schema}, this streamrl reads {JOURNAL_SCHEMA}"
            raise StreamRLError(f"the journal has {schemas}: use the streamrl that wrote it")
        return record


def sampled_record(trajectory: Trajectory) -> JournalSampled:
    """Return the record of ``trajectory``, without its prompt."""
    return JournalSampled(**_fields_of(JournalSampled, trajectory))


def scored_record(scored: ScoredTrajectory) -> JournalScored:
    """Return the record of the reward of ``scored``, without its trajectory."""
    return JournalScored(id=scored.trajectory.id, **_fields_of(TrajectoryReward, scored))


def content_records(identity: TrajectoryId, content: Content) -> list[JournalRecord]:
    """Return the records from which ``content`` of a trajectory is restored."""
    if isinstance(content, SampledSoFar):
        return [JournalPaused(id=identity, done=content)]
    if isinstance(content, EpisodeSoFar):
        turns = [JournalTurn(id=identity, number=number, turn=turn) for number, turn in enumerate(content.turns)]
        return [*turns, *(JournalCall(id=identity, call=call) for call in content.returned)]
    if isinstance(content, ScoredTrajectory):
        return [sampled_record(content.trajectory), scored_record(content)]
    return [sampled_record(content)]


def trajectory_of(sampled: JournalSampled, prompt: Prompt) -> Trajectory:
    """Return the trajectory of a record: the inverse of ``sampled_record``."""
    return Trajectory(prompt=prompt, **asdict(sampled))


def scored_trajectory(trajectory: Trajectory, scored: JournalScored) -> ScoredTrajectory:
    """Return ``trajectory`` with the reward of a record: the inverse of ``scored_record``."""
    return ScoredTrajectory(trajectory=trajectory, **_fields_of(TrajectoryReward, scored))


def _fields_of(kind: type[Record], record: Record) -> JsonObject:
    """Return those fields of ``record`` that ``kind`` has, by name."""
    return {name: getattr(record, name) for name in kind.__struct_fields__}
