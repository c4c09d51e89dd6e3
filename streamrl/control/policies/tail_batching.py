"""RollPacker's tail batching (arXiv 2509.21009, section 3; ``rounds = "tail_batching"``): short rounds race, and long
rounds train the deferred prompts. ``round_policies`` and ``auto`` make the policy.

A short round launches ``prompt_oversampling`` times the prompts of a batch with ``response_oversampling`` times their
responses. It keeps the first responses of a prompt that are *rewarded*, and the first prompts that are complete. All
other prompts are deferred to a queue. When a batch of them waits, a long round trains exactly these prompts, without a
race. So one long round follows 1 / (prompt_oversampling - 1) short rounds, and every prompt is trained. A long round of
several batches takes several optimizer steps along one gradient, of which only the first is on-policy."""

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
"""Where group sizes vary: once this many times the prompts of a long round wait in all, a size with one batch of
prompts gets a long round, though a smaller one. A small long round takes as long as a large one, since it waits for its
longest completion too; but without it long prompts would stay untrained."""


class TailBatchingRounds(StatelessRounds):
    """Round policy of short rounds, which race more prompts and samples than a batch takes, and of long rounds for
    deferred prompts. On-policy unless deferred prompts continue from their tokens."""

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
            return self._replace_dropped(view)
        due = self._size_due(view)
        size = due or view.group_size
        batch = view.batch_trajectories // view.trajectories_of(size)
        waiting = self._waiting(view, size)
        batches = self._options.long_round_batches
        if view.steps_left == 1 or due:  # the last step trains all batches that wait, however few; a due size as well
            batches = max(1, min(batches, waiting // batch))
        long_groups = self._whole_batches(min(waiting, batch * batches), batch)
        # Paused groups have tokens of older versions: the staleness bound may require an early long round.
        stale = self._pauses and bool(view.due) and view.due[0][0] <= view.trainer_version
        if waiting >= batch * batches or (waiting and (stale or view.exhausted)):
            return self._long(view, long_groups, size)
        # Groups that were paused may have ended meanwhile. They have joined the batch or are ready to join it, and may
        # have another size, so that missing groups are counted by trajectories.
        missing = math.ceil(view.missing / size) - view.untrained
        racing = math.ceil(self._options.prompt_oversampling * batch) - view.joined - view.untrained
        to_launch = max(racing, missing - waiting)
        if to_launch > 0:
            return self._race(view, to_launch)
        return self._long(view, long_groups, size) if waiting else None

    def _size_due(self, view: RoundView) -> int:
        """Group size of the long round that can open now, where sizes vary; 0 where none can. It is the size with most
        waiting prompts, once they fill a long round, or at least one batch while ``WAITING_IN_ALL`` times a long round
        wait in all.

        Deferred prompts are trained at the size at which they raced. At a size chosen since then, long prompts, which
        are deferred, would count for more than short ones in a run whose sizes follow the lengths."""
        if len(self._sizes) == 1:
            return 0
        counts = Counter(ref.group_size for ref in view.queue)
        waiting = {size: view.trajectories_of(size) * counts[size] for size in self._sizes}
        batch = view.batch_trajectories
        batches = 1 if view.steps_left == 1 else self._options.long_round_batches
        in_all = sum(waiting.values())
        long_round = batch * batches
        if in_all < long_round:
            return 0
        enough = batch if in_all >= WAITING_IN_ALL * long_round else long_round
        sizes = [size for size in self._sizes if waiting[size] >= enough]
        return max(sizes, key=waiting.__getitem__, default=0)

    def _whole_batches(self, groups: int, batch: int) -> int:
        """Round ``groups`` down to whole batches, so that they do not race for the places of a long round."""
        if self._pauses or groups < batch:
            return groups
        return groups - groups % batch

    def _waiting(self, view: RoundView, size: int) -> int:
        """Number of deferred prompts that a long round of groups of ``size`` could train."""
        if self._pauses:
            return view.paused
        if not self._queued_at(view, size):
            return view.queued
        return sum(ref.group_size == size for ref in view.queue)

    def _queued_at(self, view: RoundView, size: int) -> int:
        """``Launch.queued_at`` of a long round: any size (0) where sizes do not vary, or the source has no more."""
        return 0 if len(self._sizes) == 1 or view.exhausted else size

    def _replace_dropped(self, view: RoundView) -> Launch | None:
        """Replace groups that were dropped in the open round, so that the round can fill its batch."""
        size = view.group_size
        missing = math.ceil(view.missing / size) - view.untrained
        if view.round_kind == SHORT and not view.exhausted:
            racing = math.ceil(self._options.prompt_oversampling * (view.target // size))
            to_launch = max(racing - view.joined - view.untrained, missing)
            return self._race(view, to_launch) if to_launch > 0 else None
        if missing <= 0:
            return None
        waiting = self._waiting(view, size)
        if waiting:
            return self._long(view, min(missing, waiting), size)
        groups, source = self._fresh(view, missing)
        return Launch(groups=groups, source=source, size=size, round_kind=LONG)

    def _fresh(self, view: RoundView, groups: int) -> tuple[int, Source]:
        """Number and source of fresh groups. Where deferred prompts are paused, only a run that this one was forked
        from can have left a queue, whose prompts go first."""
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
