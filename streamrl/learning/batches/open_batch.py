"""The batch that a rank has open: what it counted, and the groups that wait to be computed. No tensor is touched."""

from __future__ import annotations

from streamrl.base.errors import StreamRLError
from streamrl.base.types import TrainingGroup
from streamrl.learning.batches.gradients import BatchSums
from streamrl.learning.batches.preparation import counts_in_loss, has_signal
from streamrl.learning.options import TrainerOptions
from streamrl.recipe.algorithms import WHOLE_BATCH


class OpenBatch:
    """From the first group to the close. ``batch_id`` is None until the first group came.

    ``waiting_tokens``: of the samples in ``waiting`` that the loss counts. ``sample_ids``: of all of those so far.
    """

    def __init__(self, options: TrainerOptions) -> None:
        self._options = options
        self.batch_id: int | None = None
        self.sums = BatchSums()
        self.waiting: list[TrainingGroup] = []
        self.waiting_tokens = 0
        self.sample_ids: list[str] = []

    def take(self, group: TrainingGroup) -> None:
        """Count a group, and let it wait if it has to be computed. Raises ``StreamRLError`` for another batch's."""
        if self.batch_id is None:
            self.batch_id = group.batch_id
        if group.batch_id != self.batch_id:
            raise StreamRLError(
                f"group {group.group_id} is of batch {group.batch_id} while batch {self.batch_id} is open"
            )
        options, sums = self._options, self.sums
        seen = [sample for sample in group.samples if counts_in_loss(sample, options)]
        sums.groups += 1
        sums.samples += len(group.samples)
        sums.trained_tokens += sum(sample.trained_tokens for sample in group.samples)
        sums.loss_tokens += sum(sample.trained_tokens for sample in seen)
        if not has_signal(group, options):
            sums.groups_without_signal += 1
            # Its advantages are 0, which the deviation of a whole batch has to count.
            if options.objective.advantages not in WHOLE_BATCH:
                return
        self.waiting.append(group)
        self.waiting_tokens += sum(len(sample.token_ids) for sample in seen)
        self.sample_ids += [str(sample.id) for sample in seen]

    def take_waiting(self) -> list[TrainingGroup]:
        """The groups that wait; from now on none does."""
        groups, self.waiting, self.waiting_tokens = self.waiting, [], 0
        return groups
