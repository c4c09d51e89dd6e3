"""RollPacker's tail batching (arXiv 2509.21009, section 4): most rounds race, and the losers have a round of their own.

A short round launches ``prompt_oversampling`` times the prompts of a batch with ``response_oversampling`` times their
responses, keeps the first responses of a prompt that are *rewarded*, and the first prompts that are complete. Prompts
that lose join a queue; when a batch of them waits, a long round trains exactly those, without a race. So 1 /
(prompt_oversampling - 1) short rounds are followed by a long one, and every prompt is trained.
"""

from __future__ import annotations

import math

from streamrl.base.types import DropReason
from streamrl.control.round_policy import Candidate, Launch, Remainder, RoundView, Source, StatelessRounds
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import SAME_NOISE, DeferredPrompts, SizingKind, tail_batching_slots

SHORT, LONG = "short", "long"
"""Kinds of round of a race: the race itself, and the one that trains the prompts which it deferred."""


class TailBatching(StatelessRounds):
    """On-policy unless losers are resumed from their tokens."""

    def __init__(self, settings: ControlSettings) -> None:
        options = settings.tail_batching
        self._options = options
        self._batch = settings.batch_trajectories
        fixed = settings.group_sizing.kind is SizingKind.FIXED
        self._sizes = (settings.group_size,) if fixed else settings.group_sizing.sizes
        self._parks = options.deferred_prompts is DeferredPrompts.RESUME
        self.on_policy = not self._parks
        self.replays = options.deferred_prompts in SAME_NOISE

    def launch(self, view: RoundView) -> Launch | None:
        if not view.at_barrier:
            return None
        if view.round_kind:
            return self._go_on(view)
        batch = view.batch_trajectories // view.group_size
        waiting = self._waiting(view)
        batches = self._options.long_round_batches
        if view.steps_left == 1 or view.long_due:  # their last chance, however few batches they are; or their turn
            batches = max(1, min(batches, waiting // batch))
        whole = self._whole_batches(min(waiting, batch * batches), batch)
        # Parked losers have tokens of older versions: a long round comes early where the staleness bound asks for it.
        due = self._parks and bool(view.due) and view.due[0][0] <= view.trainer_version
        if waiting >= batch * batches or (waiting and (due or view.exhausted)):
            return self._long(view, whole)
        # Parked losers may have ended meanwhile: they are in the batch, or ready for the next.
        # Counted in places, too: those may be of another size.
        missing = math.ceil(view.seats / view.group_size) - view.untrained
        wanted = max(
            math.ceil(self._options.prompt_oversampling * batch) - view.joined - view.untrained, missing - waiting
        )
        if wanted > 0:
            return self._race(view, wanted, Source.FRESH)
        return self._long(view, whole) if waiting else None

    def _whole_batches(self, groups: int, batch: int) -> int:
        """Of so many groups those that a long round trains; more would race in it."""
        return groups if self._parks or groups < batch else groups - groups % batch

    def _waiting(self, view: RoundView) -> int:
        return view.held if self._parks else view.queued

    def _go_on(self, view: RoundView) -> Launch | None:
        """Groups that were dropped are refilled, so that the round can fill its batch."""
        coming = view.untrained - view.unseated
        missing = math.ceil(view.seats / view.group_size) - coming
        if view.round_kind == SHORT and not view.exhausted:
            racing = math.ceil(self._options.prompt_oversampling * (view.target // view.group_size))
            wanted = max(racing - view.joined - view.untrained, missing)
            return self._race(view, wanted, Source.FRESH) if wanted > 0 else None
        if missing <= 0:
            return None
        waiting = self._waiting(view)
        if waiting:
            return self._long(view, min(missing, waiting))
        groups, source = self._queue_first(view, missing, Source.FRESH)
        return Launch(groups=groups, source=source, size=view.group_size, round_kind=LONG)

    def _queue_first(self, view: RoundView, groups: int, source: Source) -> tuple[int, Source]:
        """Parked losers are held. A queue is there when the run was forked from one that queued them."""
        if self._parks and view.queued:
            return min(groups, view.queued), Source.QUEUE
        return groups, source

    def _race(self, view: RoundView, groups: int, source: Source) -> Launch:
        groups, source = self._queue_first(view, groups, source)
        return Launch(
            groups=groups,
            source=source,
            size=math.ceil(self._options.response_oversampling * view.group_size),
            keep=view.group_size,
            round_kind=SHORT,
        )

    def _long(self, view: RoundView, groups: int) -> Launch:
        batches = max(1, groups * view.group_size // view.batch_trajectories)
        return Launch(
            groups=groups,
            source=Source.HELD if self._parks else Source.QUEUE,
            size=view.group_size,
            round_kind=LONG,
            target=batches * view.batch_trajectories,
        )

    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        if not self._parks:
            return True
        return view.leaves_time_for_others(candidate)

    def remainder(self, view: RoundView) -> Remainder:
        return Remainder.HOLD if self._parks else Remainder.REQUEUE

    @property
    def losing(self) -> DropReason:
        return DropReason.LOST_RACE

    def slots(self) -> int:
        return tail_batching_slots(self._options, self._batch, self._sizes)
