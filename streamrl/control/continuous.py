"""Continuous rollout without rounds: every slot is kept busy, weights change in flight, staleness is bounded by slots
and deadlines (ADR 2)."""

from __future__ import annotations

import math

from streamrl.base.types import DropReason
from streamrl.control.round_policy import Candidate, Launch, Remainder, RoundView, StatelessRounds
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import StalePolicy


class ContinuousRounds(StatelessRounds):
    """Staleness of ``rollout.max_staleness`` at most."""

    on_policy = False
    drop_reason = DropReason.STALE

    def __init__(self, settings: ControlSettings) -> None:
        self._max_staleness = settings.max_staleness
        self._slots = (settings.max_staleness + 1) * settings.batch_trajectories

    def launch(self, view: RoundView) -> Launch | None:
        # What is launched beyond the last batch would be thrown away.
        batch = view.batch_trajectories
        unfilled = view.missing - view.untrained_trajectories
        needed = unfilled + (view.steps_left - 1) * batch
        # What is launched now must be trained by ``live_version + max_staleness``, after all that is under way.
        room = unfilled + (view.live_version + self._max_staleness - view.trainer_version) * batch
        groups = min(room // view.group_size, math.ceil(needed / view.group_size))
        # A queue is there when the run was forked from one of other rounds: what waits longest goes first.
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
