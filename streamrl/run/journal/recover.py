"""Recovery of a run from its journal, in the controller process.

At the start of a resumed run ``launch/run_record.py`` rebuilds control by replaying events. ``Resumption``, an observer
of the ``Controller``, then trains the batches again that the trainer ranks lack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from streamrl.base.errors import StreamRLError
from streamrl.base.messages import StepReport, WeightAnnouncement
from streamrl.base.stage_messages import EpisodeSoFar, SampledSoFar
from streamrl.base.types import ScoredTrajectory, Trajectory, TrajectoryId
from streamrl.base.waits import Waits
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.comm.wire import Buffer
from streamrl.contracts import Observer, Turns
from streamrl.control import actions as do
from streamrl.control.events import BatchTrained, ControlEvent
from streamrl.control.machine import Control
from streamrl.control.run_state import RunState, Snapshot
from streamrl.control.unanswered_orders import groups_in_batch
from streamrl.run.journal.journal_file import JournalContent
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


class TrainedBatch(Struct, frozen=True):
    """A batch with which the trainer made a step. To train it again, the orders ``groups`` are sent in their order,
    then
    ``step``."""

    groups: tuple[do.TrainGroupNow, ...]
    step: do.StepOptimizer

    @property
    def policy_version(self) -> int:
        """Version that the step made."""
        return self.step.policy_version


class RecoveredRun:
    """A run as it was after the last event of its journal. *Base*: the snapshot of control with which the newest
    segment of the journal begins.

    ``control``: control;
    ``trained``: batches with which the trainer made steps since the base;
    ``events``: number of events since the start of the run;
    ``replayed``: number of events since the base;
    ``elapsed_s``: time of the last event, in seconds since the start of the run;
    ``store``: content of the trajectories and prompts that control's state names;
    ``published``: newest version that the ranks published since the base."""

    def __init__(self, base: JournalBase, restore: Restore, held_version: int) -> None:
        """``held_version``: version that the trainer ranks hold."""
        self._held_version = held_version
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
        """Newest version that the trainer had made. A deterministic run takes answers in a fixed order, so control may
        not have taken the answer of this step yet."""
        return self.trained[-1].policy_version if self.trained else self.state.trainer_version

    def replay(self, record: JournalRecord) -> None:
        """Apply the next record."""
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
                prompt = self.store.prompts.get(record.id.prompt_id)
                if prompt is not None:  # else the trajectory was dropped
                    self.store.add(trajectory_of(record, prompt))
            case JournalScored():
                trajectory = self.store.trajectories.get(record.id)
                if isinstance(trajectory, Trajectory):
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
        """Note the batch of a ``BatchTrained``, before control handles the event and forgets the batch."""
        step = self.state.pending.step
        if not isinstance(event, BatchTrained) or step is None or event.policy_version != step.policy_version:
            return
        if not self.trained or event.policy_version > self.version:
            self.trained.append(TrainedBatch(tuple(groups_in_batch(self.state)), step))

    def settle(self) -> None:
        """Forget trajectories that nothing needs any more, after the last record."""
        needed = set(self.trained_ids())
        needed.update(trajectory for group in self.state.buffer.groups() for trajectory in group.ids)
        self.store.forget([trajectory for trajectory in self.store.trajectories if trajectory not in needed])

    def trained_ids(self) -> list[TrajectoryId]:
        """Return the trajectories of all batches in ``trained``."""
        return [trajectory for batch in self.trained for group in batch.groups for trajectory in group.ids]

    def trained_since(self, version: int) -> list[TrainedBatch]:
        """Return the batches that ranks with ``version`` must train to make the newest version, oldest first."""
        return [batch for batch in self.trained if batch.policy_version > version]

    @property
    def has_all_batches(self) -> bool:
        """Whether the journal has every batch that was trained after the version that the ranks hold."""
        versions = [batch.policy_version for batch in self.trained_since(self._held_version)]
        return versions == list(range(self._held_version + 1, self.version + 1))

    def batch_of(self, policy_version: int) -> list[ScoredTrajectory]:
        """Return the trajectories that were trained into ``policy_version``; empty for a version before the base."""
        batches = [batch for batch in self.trained if batch.policy_version == policy_version]
        return self.store.scored(trajectory for batch in batches for group in batch.groups for trajectory in group.ids)


def recovered_run(content: JournalContent, restore: Restore, held_version: int) -> RecoveredRun | None:
    """Return the run that a journal restores, for ranks that hold ``held_version``; None where the journal is empty.
    Replay begins with the last base, or with an older one where the ranks hold an older version because a checkpoint is
    damaged. ``restore``: function that makes control of a snapshot. Raises ``StreamRLError``."""
    run = None
    for segment in reversed(range(len(content.segments))):
        run = replayed_run(content.records(segment), restore, held_version)
        if run is None or run.has_all_batches:
            break
    return run


def replayed_run(records: Iterable[Buffer], restore: Restore, held_version: int) -> RecoveredRun | None:
    """Return the run that ``records``, a base first, restore; None without records. Raises ``StreamRLError``."""
    codec = JournalCodec()
    run = None
    for body in records:
        record = codec.decode(body)
        if run is not None:
            run.replay(record)
        elif isinstance(record, JournalBase):
            run = RecoveredRun(record, restore, held_version)
        else:
            raise StreamRLError(f"a journal begins with a {type(record).__name__} instead of a base")
    if run is not None:
        run.settle()
    return run


def what_was_restored(run: RecoveredRun) -> dict[str, int]:
    """Return counts of the restored content, for the report of the run: ``unscored`` trajectories are complete and
    without a reward, ``partial`` ones go on from their tokens, ``again`` ones have no tokens and are sampled again."""
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
    """Brings the trainer ranks of a resumed run to the version of its journal.

    ``held_version``: version that the ranks held at first;
    ``policy_version``: version that they hold now;
    ``turns``: turns of engines and ranks;
    ``batches``: number of batches that they trained again;
    ``reports``: reports of all ranks on the last of these batches."""

    def __init__(
        self, recovered: RecoveredRun, trainer: TrainerRanks, waits: Waits, turns: Turns | None = None
    ) -> None:
        self.recovered = recovered
        self._trainer = trainer
        self._turns = turns or Turns()
        self._waits = waits
        self.held_version = self.policy_version = trainer.policy_version
        self.batches = 0
        self.reports: Sequence[StepReport] = ()

    async def prepare(self) -> None:
        """Train the batches again that the ranks lack, from the journal's tokens and rewards. Raises ``StreamRLError``
        for ranks that hold a newer version than the journal, or a version from before the journal's base."""
        with self._waits.waiting_for("the trainer to train again what the journal has"):
            await self._retrain()

    async def on_began(self, anchor: WeightAnnouncement) -> None:
        """Forget the trajectories that were trained again. ``anchor``: the complete version that the trainer serves."""
        self.recovered.store.forget(self.recovered.trained_ids())

    async def _retrain(self) -> None:
        recovered = self.recovered
        trainer = self._trainer
        trainer_version = self.held_version
        journal_version = recovered.version
        if trainer_version > journal_version:
            raise StreamRLError(
                f"the trainer holds version {trainer_version}, the journal ends at version {journal_version}: it is of "
                "another run, or was cut; start from a checkpoint (checkpoint.resume_from)"
            )
        batches = recovered.trained_since(trainer_version)
        if not recovered.has_all_batches:
            raise StreamRLError(
                f"the trainer begins with version {trainer_version}, the journal has no batches of versions "
                f"{trainer_version + 1} to {journal_version}: is a checkpoint of this run missing or damaged? "
                "start from another one (checkpoint.resume_from)"
            )
        if batches:
            await self._turns.train()
        for batch in batches:
            for order in batch.groups:
                group = recovered.store.training_group(
                    order.group_id, order.batch_id, order.ids, order.temperature, order.baseline
                )
                await trainer.train_group(group)
            gather = await trainer.close_batch(close_of(batch.step))  # the order is sent; ``gather`` awaits the reports
            self.reports = await gather()
            # No engine waits for this version: all of them get the newest one when the run goes on.
            await trainer.acknowledge(batch.policy_version)
        self.policy_version = journal_version
        self.batches = len(batches)
