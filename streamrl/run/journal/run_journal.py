"""Writer of the controller's journal: control's events, and the tokens and rewards that they are about.

Appending never waits. Before a step of the optimizer, which cannot be undone, ``settled`` waits until everything before
it is on the disk. When a checkpoint is durable a new segment begins with the state of control. The segment before it
stays until the next checkpoint: if the newer one turns out to be damaged, the run resumes from the older."""

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
from streamrl.control.model import Snapshot
from streamrl.run.journal.log import JournalFile
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
    """``journal`` None: nothing is written. ``store``: what control may still ask for. ``recovered``: what an earlier
    life left in it."""

    def __init__(
        self, journal: JournalFile | None, store: TrajectoryStore, recovered: RecoveredRun | None = None
    ) -> None:
        self._journal = journal
        self._store = store
        self._begun = recovered is not None
        self.elapsed: Callable[[], float] = lambda: 0.0
        """Seconds since the run began; the report measures them."""
        self._codec = JournalCodec()
        self._last = 0
        self._events = recovered.events if recovered else 0
        self._published = recovered.published if recovered else None

    def drawn(self, prompts: Sequence[Prompt]) -> None:
        """Append prompts before control knows of them."""
        for prompt in prompts:
            self._append(JournalPrompt(prompt=prompt))

    async def sampled(self, trajectory: Trajectory) -> None:
        """Append a trajectory that has left the engines, before it is scored. Waits while the disk is behind."""
        await self._room()
        if not trajectory.evaluation:
            self._store.add(trajectory)
            self._append(sampled_record(trajectory))

    async def paused(self, trajectory: TrajectoryId, done: SampledSoFar) -> None:
        """Append what a paused trajectory has. Waits while the disk is behind."""
        await self._room()
        self._store.add_part(trajectory, done)
        self._append(JournalPaused(id=trajectory, done=done))

    async def turn(self, trajectory: TrajectoryId, number: int, turn: TurnSoFar) -> None:
        """Append a turn of an episode, before the episode hears of it. Waits while the disk is behind."""
        await self._room()
        self._store.add_turn(trajectory, number, turn)
        self._append(JournalTurn(id=trajectory, number=number, turn=turn))

    def returned(self, trajectory: TrajectoryId, call: ReturnedCall) -> None:
        """Append a call of a tool that has returned."""
        self._store.add_call(trajectory, call)
        self._append(JournalCall(id=trajectory, call=call))

    def scored(self, scored: ScoredTrajectory) -> None:
        """Append a reward before control knows of it."""
        self._append(scored_record(scored))

    def published(self, policy_version: int, state_hash: int) -> None:
        """Ranks have made this version."""
        self._published = JournalPublished(policy_version=policy_version, state_hash=state_hash)
        self._append(self._published)

    def decided(self, decision: Decision) -> None:
        """Append a decision that was made outside of control, for people."""
        self._append(JournalDecision(decision=decision, time_s=round(self.elapsed(), 4)))

    async def begin(self, control: Control) -> None:
        """Control took ``RunBegan``. On the disk when it returns: no checkpoint is written before, without a journal
        nothing would go on from it. Raises ``JournalFailed``."""
        self._begin_segment(control, 0.0)
        await self.settled()

    def on_event(self, event: ControlEvent, control: Control) -> None:
        """``event`` happened; before control takes it."""
        elapsed_s = self.elapsed()
        if isinstance(event, CheckpointDone):
            self._begin_segment(control, elapsed_s)
        self._events += 1
        self._append(JournalEvent(event=event, time_s=round(elapsed_s, 4)))

    async def settled(self) -> None:
        """Return when everything so far is on the disk. Raises ``JournalFailed``."""
        if self._journal is not None and self._last:
            await self._journal.durable(self._last)

    async def _room(self) -> None:
        """Wait while more waits to be written than memory should hold."""
        if self._journal is not None:
            await self._journal.room()

    def _begin_segment(self, control: Control, elapsed_s: float) -> None:
        if self._journal is not None:
            self._begun = True
            self._last = self._journal.begin_segment(self._base(control.snapshot(), elapsed_s))

    def _base(self, control: Snapshot, elapsed_s: float) -> Iterator[bytes]:
        encode = self._codec.encode
        yield encode(JournalBase(schema=JOURNAL_SCHEMA, control=control, events=self._events, elapsed_s=elapsed_s))
        yield from (encode(JournalPrompt(prompt=prompt)) for prompt in self._store.prompts.values())
        if self._published is not None:
            yield encode(self._published)
        for identity, content in self._store.trajectories.items():
            yield from map(encode, content_records(identity, content))

    def _append(self, record: JournalRecord) -> None:
        if self._journal is not None and self._begun:  # the first base says what was before it
            self._last = self._journal.append(self._codec.encode(record))
