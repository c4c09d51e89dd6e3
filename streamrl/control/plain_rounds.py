"""The plain rounds, which a run without wings has. Synchronous (``rollout.rounds = "synchronous"``), the baseline:
launch one batch of groups under the live weights, wait for all of them, step, push, repeat. Continuous: all slots stay
busy, weights change while trajectories are sampled, and slots and deadlines bound the staleness (ADR 2).
``round_policies`` and ``auto`` make the policies."""

from __future__ import annotations

import math

from streamrl.base.types import DropReason
from streamrl.control.round_policy import Candidate, Launch, Remainder, RoundView, Source, StatelessRounds
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import StalePolicy


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


class ContinuousRounds(StatelessRounds):
    """Round policy of continuous rollout, with a staleness of at most ``rollout.max_staleness``."""

    on_policy = False
    drop_reason = DropReason.STALE

    def __init__(self, settings: ControlSettings) -> None:
        self._max_staleness = settings.max_staleness
        self._slots = (settings.max_staleness + 1) * settings.batch_trajectories

    def launch(self, view: RoundView) -> Launch | None:
        # Groups beyond the last batch of the run would never be trained.
        batch = view.batch_trajectories
        unfilled = view.missing - view.untrained_trajectories
        needed = unfilled + (view.steps_left - 1) * batch
        # Groups launched now must be trained by ``live_version + max_staleness``, after all groups under way.
        room = unfilled + (view.live_version + self._max_staleness - view.trainer_version) * batch
        groups = min(room // view.group_size, math.ceil(needed / view.group_size))
        # A run that was forked from one with other rounds has a queue, whose prompts have waited longest.
        groups, source = view.queue_first(groups)
        return Launch(groups=groups, source=source, size=view.group_size, round_kind="continuous")

    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        if view.when_stale is not StalePolicy.WAIT:
            return candidate.deadline >= view.trainer_version
        return view.leaves_time_for_others(candidate)

    def remainder(self, view: RoundView) -> Remainder:
        return Remainder.KEEP

    def slots(self) -> int:
        return self._slots
