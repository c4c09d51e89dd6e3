"""Continuous rollout without rounds (``rollout.rounds = "continuous"``): all slots stay busy, weights change while
trajectories are sampled, and slots and deadlines bound the staleness (ADR 2). ``round_policies`` makes it."""

from __future__ import annotations

import math

from streamrl.base.types import DropReason
from streamrl.control.round_policy import Candidate, Launch, Remainder, RoundView, StatelessRounds
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import StalePolicy


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
