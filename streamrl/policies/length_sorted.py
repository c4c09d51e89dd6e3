"""SortedRL's rounds (arXiv 2603.23414, section 3; refs/sortedrl.md 1.9): a cohort of prompts, cut when a batch is
ready.

A cohort of n batches of prompts is loaded at once and oversubscribes the engines. The batch takes what is ready first,
hence short completions; then everything that still runs is cut and either sampled again from its start under the next
weights (on-policy), or goes on from its tokens (partial). No new prompt is drawn until the cohort is trained, so a
prompt waits for n updates at most, and a partial trajectory has tokens of n versions at most. Where a prompt's history
or its own length predicts that its completions are short, it is launched earlier (section 3 of the paper).
"""

from __future__ import annotations

from streamrl.base.types import DropReason
from streamrl.control.round_policy import Candidate, Launch, Remainder, RoundView, Source, StatelessRounds
from streamrl.control.settings import ControlSettings

SORTED = "sorted"


class LengthSorted(StatelessRounds):
    """On-policy or partial. Groups are admitted whole; with ``single`` each trajectory is a group of its own."""

    predicts_lengths = True

    def __init__(self, settings: ControlSettings) -> None:
        options = settings.length_sorted
        self._options = options
        self._batch = settings.batch_trajectories
        self.on_policy = not options.partial
        self.cut_tokens = options.cut_tokens

    def launch(self, view: RoundView) -> Launch | None:
        if not view.at_barrier:
            return None
        if view.held:
            return Launch(groups=view.held, source=Source.HELD, size=0, round_kind=SORTED)
        size = 1 if self._options.single else view.group_size
        if view.queued:
            room = self._in_flight_limit() - view.untrained_trajectories
            groups = min(view.queued, room // size)
            return Launch(groups=groups, source=Source.QUEUE, size=size, round_kind=SORTED) if groups > 0 else None
        if view.untrained or view.exhausted:
            return None
        # To the end of a batch: a cohort that opens in the middle of one (groups were dropped) must not span one more.
        trajectories = view.seats + (self._options.cohort_batches - 1) * view.batch_trajectories
        prompts = max(trajectories // view.group_size, 1)
        copies = view.group_size if self._options.single else 1
        return Launch(groups=prompts, source=Source.COHORT, size=0, round_kind="", copies=copies)

    def _in_flight_limit(self) -> int:
        oversubscription = self._options.oversubscription
        return round(oversubscription * self._batch) if oversubscription else self.slots()

    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        if self.on_policy:
            return True
        return view.leaves_time_for_others(candidate)

    def remainder(self, view: RoundView) -> Remainder:
        return Remainder.HOLD if self._options.partial else Remainder.REQUEUE

    @property
    def losing(self) -> DropReason:
        return DropReason.CUT

    def slots(self) -> int:
        return self._options.cohort_batches * self._batch
