"""Recovery of a run from its journal: control is rebuilt by replay, and ranks train again what they lack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.base.messages import StepReport, WeightAnnouncement
from streamrl.base.stage_messages import EpisodeSoFar, SampledSoFar
from streamrl.base.types import ScoredTrajectory, Trajectory
from streamrl.base.waits import Waits
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.comm.wire import Buffer
from streamrl.contracts import Observer
from streamrl.control import actions as do
from streamrl.control.events import BatchTrained, ControlEvent
from streamrl.control.machine import Control
from streamrl.control.model import RunState, Snapshot
from streamrl.control.pending import groups_in_batch
from streamrl.run.journal.log import Found
from streamrl.run.journal.records import (
    JournalBase,
    JournalCall,
    JournalCodec,
    JournalEvent,
    JournalPaused,
    JournalPrompt,
    JournalPublished,
    JournalRecord,
    JournalSampled,
    JournalScored,
    JournalTurn,
    scored_trajectory,
    trajectory_of,
)
from streamrl.run.trainer_ranks import TrainerRanks, close_of

Restore = Callable[[Snapshot], Control]


class TrainedBatch(msgspec.Struct, frozen=True):
    """A batch that was stepped: to train it again is to carry out ``groups``, in their order, and then ``step``."""

    groups: tuple[do.TrainGroupNow, ...]
    step: do.StepOptimizer

    @property
    def policy_version(self) -> int:
        """The version that it made."""
        return self.step.policy_version


class RecoveredRun:
    """``control`` is as it was after the last event of the journal: ``events`` so far, ``replayed`` since the base;
    ``elapsed_s`` after the start of the run. ``held``: the version that the ranks hold; ``trained``: batches that were
    stepped since the base. ``store``: the content behind what control knows."""

    def __init__(self, base: JournalBase, restore: Restore, held: int) -> None:
        self._held = held
        self.control = restore(base.control)
        self.trained: list[TrainedBatch] = []
        self.events = base.events
        self.elapsed_s = base.elapsed_s
        self.replayed = 0
        self.store = TrajectoryStore()
        self.published: JournalPublished | None = None

    @property
    def state(self) -> RunState:
        """State of control."""
        return self.control.state

    @property
    def version(self) -> int:
        """Version that the trainer had made; control may not have counted it yet (a deterministic run)."""
        return self.trained[-1].policy_version if self.trained else self.state.trainer_version

    def take(self, record: JournalRecord) -> None:
        """The next record."""
        match record:
            case JournalBase():
                raise StreamRLError("a journal with a base in its middle: it was not written by this streamrl")
            case JournalEvent(event=event, time_s=time_s):
                self.events += 1
                self.replayed += 1
                self.elapsed_s = time_s
                self._note_trained(event)
                self.control.handle(event)
            case JournalPrompt():
                self.store.add_prompts((record.prompt,))
            case JournalSampled():
                if (prompt := self.store.prompts.get(record.id.prompt_id)) is not None:  # else it was dropped
                    self.store.add(trajectory_of(record, prompt))
            case JournalScored():
                if isinstance(trajectory := self.store.trajectories.get(record.id), Trajectory):
                    self.store.add(scored_trajectory(trajectory, record))
            case JournalPaused():
                self.store.add_part(record.id, record.done)
            case JournalTurn():
                self.store.add_turn(record.id, record.number, record.turn)
            case JournalCall():
                self.store.add_call(record.id, record.call)
            case JournalPublished():
                self.published = record

    def _note_trained(self, event: ControlEvent) -> None:
        step = self.state.pending.step
        if not isinstance(event, BatchTrained) or step is None or event.policy_version != step.policy_version:
            return
        if not self.trained or event.policy_version > self.version:
            self.trained.append(TrainedBatch(tuple(groups_in_batch(self.state)), step))

    def settle(self) -> None:
        """All records were taken: forget what has ended."""
        needed = {trajectory for batch in self.trained for group in batch.groups for trajectory in group.ids}
        needed.update(trajectory for group in self.state.buffer.groups() for trajectory in group.ids)
        self.store.forget([one for one in self.store.trajectories if one not in needed])

    def trained_since(self, version: int) -> list[TrainedBatch]:
        """Batches that were stepped after ``version``, oldest first: what brings ranks that hold it up to now."""
        return [batch for batch in self.trained if batch.policy_version > version]

    @property
    def leads_on(self) -> bool:
        """Return whether every batch is there that was trained after the version which the ranks hold."""
        batches = [batch.policy_version for batch in self.trained_since(self._held)]
        return batches == list(range(self._held + 1, self.version + 1))

    def batch_of(self, policy_version: int) -> list[ScoredTrajectory]:
        """Return what was trained into ``policy_version``, since the last checkpoint."""
        batches = [b for b in self.trained if b.policy_version == policy_version]
        return self.store.scored(trajectory for b in batches for group in b.groups for trajectory in group.ids)


def recovered_run(found: Found, restore: Restore, held: int) -> RecoveredRun | None:
    """Replay what a journal holds, for ranks that hold version ``held``; None where there is nothing. From its last
    base on, or from the one before where a damaged checkpoint makes that necessary. ``restore`` makes control of a
    snapshot. Raises ``StreamRLError``."""
    run: RecoveredRun | None = None
    for segment in reversed(range(len(found.segments))):
        run = replayed_run(found.records(segment), restore, held)
        if run is None or run.leads_on:
            break
    return run


def replayed_run(records: Iterable[Buffer], restore: Restore, held: int) -> RecoveredRun | None:
    """Replay the ``records`` since a base; None where there are none. Raises ``StreamRLError``."""
    codec = JournalCodec()
    run: RecoveredRun | None = None
    for body in records:
        record = codec.decode(body)
        if run is not None:
            run.take(record)
        elif isinstance(record, JournalBase):
            run = RecoveredRun(record, restore, held)
        else:
            raise StreamRLError(f"a journal begins with a {type(record).__name__} instead of a base")
    if run is not None:
        run.settle()
    return run


def what_was_restored(run: RecoveredRun) -> dict[str, int]:
    """Counts for people."""
    state = run.state
    groups = list(state.buffer.groups())
    contents = [run.store.trajectories.get(member) for group in groups for member in group.open_ids]
    return {
        "events": run.events,
        "replayed": run.replayed,
        "trained": state.buffer.trained,
        "scored": sum(len(group.members) - group.open for group in groups),
        "unscored": sum(isinstance(content, Trajectory | ScoredTrajectory) for content in contents),
        "partial": sum(isinstance(content, SampledSoFar | EpisodeSoFar) for content in contents),
        "again": contents.count(None),
        "queued": len(state.prompts.queue),
        "drawn": state.prompts.drawn,
    }


class Resumption(Observer):
    """Brings the trainer ranks of a resumed run to the version of its journal. ``held_version``: what they held before;
    ``policy_version``: what they hold now, of which they trained ``batches`` again; ``reports``: of the last batch."""

    def __init__(self, recovered: RecoveredRun, trainer: TrainerRanks, waits: Waits) -> None:
        self.recovered = recovered
        self._trainer = trainer
        self._waits = waits
        self.held_version = self.policy_version = trainer.policy_version
        self.batches = 0
        self.reports: Sequence[StepReport] = ()

    async def prepare(self) -> None:
        """Train again what the ranks lack: no sampling is repeated for that. Raises ``StreamRLError`` for ranks that
        are ahead, or that hold a version from before the journal's base."""
        with self._waits.waiting_for("the trainer to train again what the journal has"):
            await self._retrain()

    async def on_began(self, anchor: WeightAnnouncement) -> None:
        """Forget the tokens of what was trained again."""
        batches = self.recovered.trained
        self.recovered.store.forget(t for batch in batches for group in batch.groups for t in group.ids)

    async def _retrain(self) -> None:
        recovered = self.recovered
        trainer = self._trainer
        held = self.held_version
        wanted = recovered.version
        if held > wanted:
            raise StreamRLError(
                f"the trainer holds version {held}, the journal ends at version {wanted}: it is of another run, or was "
                "cut; start from a checkpoint (checkpoint.resume_from)"
            )
        batches = recovered.trained_since(held)
        if not recovered.leads_on:
            raise StreamRLError(
                f"the trainer begins with version {held}, the journal has no batches of versions {held + 1} to "
                f"{wanted}: is a checkpoint of this run missing or damaged? "
                "start from another one (checkpoint.resume_from)"
            )
        for batch in batches:
            for group in batch.groups:
                found = recovered.store.training_group(group.group_id, group.batch_id, group.ids, group.temperature)
                await trainer.train_group(found)
            gather = await trainer.close_batch(close_of(batch.step))
            self.reports = await gather()
            await trainer.acknowledge(batch.policy_version)  # engines take the newest at once, when it is announced
        self.policy_version = wanted
        self.batches = len(batches)
