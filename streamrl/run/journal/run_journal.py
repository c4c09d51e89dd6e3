"""Writer of the journal, in the controller process: control's events, with the tokens and rewards that they name.

The ``Controller`` and the stages call it. Appending an event never waits. Before a step of the optimizer, which cannot
be undone, ``settled`` waits until everything before it is on the disk. When a checkpoint is durable, a new segment
begins with the state of control. The segment before it stays until the next checkpoint: if the newer checkpoint turns
out to be damaged, the run resumes from the older one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from streamrl.base.messages import ReturnedCall
from streamrl.base.stage_messages import SampledSoFar, TurnSoFar
from streamrl.base.types import Prompt, ScoredTrajectory, Trajectory, TrajectoryId
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.contracts import Journal
from streamrl.control.actions import Decision
from streamrl.control.events import CheckpointDone, ControlEvent
from streamrl.control.machine import Control
from streamrl.control.run_state import Snapshot
from streamrl.run.journal.journal_file import JournalFile
from streamrl.run.journal.records import (
    JOURNAL_SCHEMA,
    JournalBase,
    JournalCall,
    JournalCodec,
    JournalDecision,
    JournalEvent,
    JournalPaused,
    JournalPrompt,
    JournalPublished,
    JournalRecord,
    JournalTurn,
    content_records,
    sampled_record,
    scored_record,
)
from streamrl.run.journal.recover import RecoveredRun


class RunJournal(Journal):
    """The journal of a run.

    ``journal``: files of the journal (None: nothing is written);
    ``store``: content of the trajectories and prompts that control's state names;
    ``recovered``: run that was restored from the journal (None: the run is new)."""

    def __init__(
        self, journal: JournalFile | None, store: TrajectoryStore, recovered: RecoveredRun | None = None
    ) -> None:
        self._journal = journal
        self._store = store
        self._has_base = recovered is not None
        self.elapsed: Callable[[], float] = lambda: 0.0
        """Function that returns the seconds since the run began; the run's report sets it."""
        self._codec = JournalCodec()
        self._last = 0
        self._events = recovered.events if recovered else 0
        self._published = recovered.published if recovered else None

    def on_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Append prompts, before control gets the event that names them."""
        for prompt in prompts:
            self._append(JournalPrompt(prompt=prompt))

    async def on_sampled(self, trajectory: Trajectory) -> None:
        """Append a trajectory that has left the engines, before it is scored. Waits while the disk is behind."""
        await self._room()
        if not trajectory.evaluation:
            self._store.add(trajectory)
            self._append(sampled_record(trajectory))

    async def on_paused(self, trajectory: TrajectoryId, completion: SampledSoFar) -> None:
        """Append the tokens of a paused trajectory. Waits while the disk is behind."""
        await self._room()
        self._store.add_part(trajectory, completion)
        self._append(JournalPaused(id=trajectory, done=completion))

    async def on_turn(self, trajectory: TrajectoryId, number: int, turn: TurnSoFar) -> None:
        """Append a turn of an episode, before the episode gets it. Waits while the disk is behind."""
        await self._room()
        self._store.add_turn(trajectory, number, turn)
        self._append(JournalTurn(id=trajectory, number=number, turn=turn))

    def on_call(self, trajectory: TrajectoryId, call: ReturnedCall) -> None:
        """Append a call of a tool that has returned."""
        self._store.add_call(trajectory, call)
        self._append(JournalCall(id=trajectory, call=call))

    def on_scored(self, scored: ScoredTrajectory) -> None:
        """Append a reward, before control gets it."""
        self._append(scored_record(scored))

    def on_published(self, policy_version: int, state_hash: int) -> None:
        """Append the state hash of the version that the ranks have made."""
        self._published = JournalPublished(policy_version=policy_version, state_hash=state_hash)
        self._append(self._published)

    def decided(self, decision: Decision) -> None:
        """Append a decision that was made outside of control, for readers of the journal."""
        self._append(JournalDecision(decision=decision, time_s=round(self.elapsed(), 4)))

    async def begin(self, control: Control) -> None:
        """Begin the first segment, after control has handled ``RunBegan``, and wait until it is on the disk: a
        checkpoint must not be older than the journal of its run. Raises ``JournalFailed``."""
        self._begin_segment(control, 0.0)
        await self.flushed()

    def on_event(self, event: ControlEvent, control: Control) -> None:
        """Append ``event``, before control handles it. A new segment begins with each checkpoint."""
        elapsed_s = self.elapsed()
        if isinstance(event, CheckpointDone):
            self._begin_segment(control, elapsed_s)
        self._events += 1
        self._append(JournalEvent(event=event, time_s=round(elapsed_s, 4)))

    async def flushed(self) -> None:
        """Return when everything so far is on the disk. Raises ``JournalFailed``."""
        if self._journal is not None and self._last:
            await self._journal.durable(self._last)

    async def _room(self) -> None:
        """Wait while too much memory is held by records that are not written yet."""
        if self._journal is not None:
            await self._journal.room()

    def _begin_segment(self, control: Control, elapsed_s: float) -> None:
        if self._journal is not None:
            self._has_base = True
            self._last = self._journal.begin_segment(self._base(control.snapshot(), elapsed_s))

    def _base(self, control: Snapshot, elapsed_s: float) -> Iterator[bytes]:
        """Yield the records that restore the run as it is now."""
        encode = self._codec.encode
        yield encode(JournalBase(schema=JOURNAL_SCHEMA, control=control, events=self._events, elapsed_s=elapsed_s))
        yield from (encode(JournalPrompt(prompt=prompt)) for prompt in self._store.prompts.values())
        if self._published is not None:
            yield encode(self._published)
        for identity, content in self._store.trajectories.items():
            yield from map(encode, content_records(identity, content))

    def _append(self, record: JournalRecord) -> None:
        if self._journal is not None and self._has_base:  # the first base has everything before it
            self._last = self._journal.append(self._codec.encode(record))
