"""RollPacker's tail batching (arXiv 2509.21009, section 3): most rounds race, and the prompts that lose have their own.

A short round launches ``prompt_oversampling`` times the prompts of a batch with ``response_oversampling`` times their
responses, keeps the first responses of a prompt that are *rewarded*, and the first prompts that are complete. The
others are deferred: they join a queue, and when a batch of them waits, a long round trains exactly those, without a
race. So 1 / (prompt_oversampling - 1) short rounds are followed by a long one, and every prompt is trained. A long
round of several batches takes several optimizer steps along one gradient, of which only the first is on-policy."""

from __future__ import annotations

import math
from collections import Counter

from streamrl.base.types import DropReason
from streamrl.control.round_policy import Candidate, Launch, Remainder, RoundView, Source, StatelessRounds
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import SAME_SEED, DeferredPrompts, tail_batching_slots

SHORT = "short"
LONG = "long"
"""Kinds of rounds."""

WAITING_IN_ALL = 1.5
"""Once so many times the batches of a long round wait in all, those of one size have theirs, though they fill fewer: a
small long round waits for its longest completion as well, but one that never comes leaves long prompts untrained."""


class TailBatchingRounds(StatelessRounds):
    """Races of more prompts and samples than a batch takes, and long rounds of those that were deferred. On-policy
    unless deferred prompts are resumed from their tokens."""

    drop_reason = DropReason.LOST_RACE

    def __init__(self, settings: ControlSettings) -> None:
        options = settings.tail_batching
        self._options = options
        self._slots = tail_batching_slots(options, settings.batches)
        self._sizes = settings.group_sizes
        self._pauses = options.deferred_prompts is DeferredPrompts.RESUME
        self.on_policy = not self._pauses
        self.replays = options.deferred_prompts in SAME_SEED

    def launch(self, view: RoundView) -> Launch | None:
        if not view.at_barrier:
            return None
        if view.round_kind:
            return self._resume_paused(view)
        due = self._size_due(view)
        size = due or view.group_size
        batch = view.batch_trajectories // view.trajectories_of(size)
        waiting = self._waiting(view, size)
        batches = self._options.long_round_batches
        if view.steps_left == 1 or due:  # their last chance, however few batches they are; or their turn
            batches = max(1, min(batches, waiting // batch))
        whole = self._whole_batches(min(waiting, batch * batches), batch)
        # Paused ones have tokens of older versions: a long round comes early where the staleness bound asks for it.
        stale = self._pauses and bool(view.due) and view.due[0][0] <= view.trainer_version
        if waiting >= batch * batches or (waiting and (stale or view.exhausted)):
            return self._long(view, whole, size)
        # Paused ones may have ended meanwhile: they are in the batch, or ready for the next.
        # Counted in places, too: those may be of another size.
        missing = math.ceil(view.missing / size) - view.untrained
        wanted = max(
            math.ceil(self._options.prompt_oversampling * batch) - view.joined - view.untrained, missing - waiting
        )
        if wanted > 0:
            return self._race(view, wanted)
        return self._long(view, whole, size) if waiting else None

    def _size_due(self, view: RoundView) -> int:
        """The group size of the long round that can open now, where sizes vary; 0: none can. The size of which most
        wait, where those are the batches of a long round, or at least one batch and ``WAITING_IN_ALL`` times as many
        wait in all.

        Deferred prompts are trained at the size at which they raced. Were it whatever is chosen meanwhile, long
        prompts, which lose, would weigh more than short ones in a run whose sizes follow the lengths."""
        if len(self._sizes) == 1:
            return 0
        counts = Counter(ref.group_size for ref in view.queue)
        waiting = {size: view.trajectories_of(size) * counts[size] for size in self._sizes}
        batch = view.batch_trajectories
        batches = 1 if view.steps_left == 1 else self._options.long_round_batches
        in_all = sum(waiting.values())
        wanted = batch * batches
        if in_all < wanted:
            return 0
        enough = batch if in_all >= WAITING_IN_ALL * wanted else wanted
        full = [size for size in self._sizes if waiting[size] >= enough]
        return max(full, key=lambda size: waiting[size], default=0)

    def _whole_batches(self, groups: int, batch: int) -> int:
        """Round groups down to those that a long round trains; more would race in it."""
        return groups if self._pauses or groups < batch else groups - groups % batch

    def _waiting(self, view: RoundView, size: int) -> int:
        """Deferred prompts that a long round of groups of ``size`` could train; any once the source has no others."""
        if self._pauses:
            return view.paused
        if not self._queued_at(view, size):
            return view.queued
        return sum(ref.group_size == size for ref in view.queue)

    def _queued_at(self, view: RoundView, size: int) -> int:
        return 0 if len(self._sizes) == 1 or view.exhausted else size

    def _resume_paused(self, view: RoundView) -> Launch | None:
        """Groups that were dropped are refilled, so that the round can fill its batch."""
        size = view.group_size
        missing = math.ceil(view.missing / size) - view.untrained
        if view.round_kind == SHORT and not view.exhausted:
            racing = math.ceil(self._options.prompt_oversampling * (view.target // size))
            wanted = max(racing - view.joined - view.untrained, missing)
            return self._race(view, wanted) if wanted > 0 else None
        if missing <= 0:
            return None
        waiting = self._waiting(view, size)
        if waiting:
            return self._long(view, min(missing, waiting), size)
        groups, source = self._fresh(view, missing)
        return Launch(groups=groups, source=source, size=size, round_kind=LONG)

    def _fresh(self, view: RoundView, groups: int) -> tuple[int, Source]:
        """Take prompts from the source, but where deferred prompts are paused: then a queue was left by the run that
        this one was forked from, and goes first."""
        return view.queue_first(groups) if self._pauses else (groups, Source.FRESH)

    def _race(self, view: RoundView, groups: int) -> Launch:
        groups, source = self._fresh(view, groups)
        size = math.ceil(self._options.response_oversampling * view.group_size)
        return Launch(groups=groups, source=source, size=size, keep=view.group_size, round_kind=SHORT)

    def _long(self, view: RoundView, groups: int, size: int) -> Launch:
        batches = max(1, groups * view.trajectories_of(size) // view.batch_trajectories)
        return Launch(
            groups=groups,
            source=Source.PAUSED if self._pauses else Source.QUEUE,
            size=size,
            group_size=size,
            queued_at=self._queued_at(view, size),
            round_kind=LONG,
            target=batches * view.batch_trajectories,
        )

    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        if not self._pauses:
            return True
        return view.leaves_time_for_others(candidate)

    def remainder(self, view: RoundView) -> Remainder:
        return Remainder.PAUSE if self._pauses else Remainder.REQUEUE

    def slots(self) -> int:
        return self._slots
