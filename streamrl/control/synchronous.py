"""Synchronous rounds (``rollout.rounds = "synchronous"``), the baseline: launch one batch of groups under the live
weights, wait for all of them, step, push, repeat. ``round_policies`` and ``auto`` make the policy."""

from __future__ import annotations

from streamrl.base.types import DropReason
from streamrl.control.round_policy import Candidate, Launch, Remainder, RoundView, Source, StatelessRounds
from streamrl.control.settings import ControlSettings


class SynchronousRounds(StatelessRounds):
    """Round policy of synchronous rounds, strictly on-policy. The same round replaces a dropped group."""

    on_policy = True
    drop_reason = DropReason.BATCH_FULL

    def __init__(self, settings: ControlSettings) -> None:
        self._batch = settings.batch_trajectories
        self._sizes = settings.group_sizes

    def launch(self, view: RoundView) -> Launch | None:
        if not view.at_barrier:
            return None
        # Another policy may have left a queue (``auto``), whose prompts go first. Where sizes vary, the round takes the
        # group size of the first prompt in it: at another size the prompt would count for more or less than the prompts
        # that it raced with.
        head_size = view.queue[0].group_size if view.queue else 0
        of_one_size = len(self._sizes) > 1 and head_size in self._sizes and not view.exhausted
        size = head_size if of_one_size and not view.round_kind else view.group_size
        queued_at = size if of_one_size else 0
        waiting = sum(queued_at in (0, ref.group_size) for ref in view.queue)
        missing = view.missing // view.trajectories_of(size) - view.untrained
        return Launch(
            groups=min(missing, waiting) if waiting else missing,
            source=Source.QUEUE if waiting else Source.FRESH,
            size=size,
            group_size=size,
            queued_at=queued_at,
            round_kind="synchronous",
        )

    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        return True

    def remainder(self, view: RoundView) -> Remainder:
        return Remainder.KEEP

    def slots(self) -> int:
        return self._batch
