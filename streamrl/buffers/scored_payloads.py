"""What was scored and is not trained yet: tokens, logprobs and rewards, of which control knows only the measure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from streamrl.base.stage_messages import EndedOutcome, Scored
from streamrl.base.types import ScoredTrajectory, TrainingGroup, TrajectoryId, to_training_sample
from streamrl.buffers.rollout_buffer import RolloutBuffer
from streamrl.control.actions import TrainGroupNow
from streamrl.control.events import ControlEvent
from streamrl.journal.run_journal import RunJournal
from streamrl.run.outcome_events import event_of


class ScoredPayloads:
    """Kept from the reward until its group is trained or dropped; the journal gets both events."""

    def __init__(self, journal: RunJournal) -> None:
        self._journal = journal
        self._payloads: dict[TrajectoryId, ScoredTrajectory] = {}
        self._open_batch: list[ScoredTrajectory] = []

    def restore(self, payloads: Mapping[TrajectoryId, ScoredTrajectory]) -> None:
        """Go on with what the life of the controller before this one had."""
        self._payloads = dict(payloads)

    def take(self, item: EndedOutcome, buffer: RolloutBuffer) -> ControlEvent | None:
        """Keep the payload of ``item``, and return the event that reports it; None: nobody waits for it any more."""
        if isinstance(item, Scored) and isinstance(item.outcome, ScoredTrajectory):
            identity = item.outcome.trajectory.id
            if buffer.member(identity) is None:
                self._journal.forget((identity,))
                return None  # cancelled while it was scored
            self._journal.scored(item.outcome)
            self._payloads[identity] = item.outcome
        return event_of(item)

    def forget(self, ids: Iterable[TrajectoryId]) -> None:
        """They will not be trained, or are already."""
        for trajectory in ids:
            self._journal.forget((trajectory,))
            self._payloads.pop(trajectory, None)

    def to_train(self, action: TrainGroupNow) -> TrainingGroup:
        """A whole group, as the trainer gets it; it is of the open batch from now on."""
        members = [self._payloads.pop(trajectory) for trajectory in action.ids]
        self._open_batch += members
        samples = tuple(to_training_sample(member) for member in members)
        return TrainingGroup(group_id=action.group_id, batch_id=action.batch_id, samples=samples)

    def close_batch(self) -> list[ScoredTrajectory]:
        """All of the open batch. The next one is open."""
        closed, self._open_batch = self._open_batch, []
        return closed
