"""SortedRL's rounds (arXiv 2603.23414, section 3): a cohort of prompts, cut when a batch is ready.

A cohort of n batches of prompts is loaded at once and oversubscribes the engines. The batch takes what is ready first,
hence short completions; then everything that still runs is cut and either sampled again from its start under the next
weights (on-policy), or goes on from its tokens (partial). No new prompt is drawn until the cohort is trained, so a
prompt waits for n updates at most, and a partial trajectory has tokens of n versions at most. Where a prompt's history
or its own length predicts that its completions are short, it is launched earlier (section 3 of the paper)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from streamrl.base.types import DropReason
from streamrl.buffers.rollout_buffer import PromptRef
from streamrl.control.events import EnginesMeasured
from streamrl.control.policies.length_prediction import PromptLengthPredictor
from streamrl.control.round_policy import (
    Candidate,
    GroupObserved,
    Launch,
    Observation,
    Remainder,
    RoundView,
    Source,
    StatelessRounds,
)
from streamrl.control.settings import ControlSettings

SORTED = "sorted"


class LengthSortedRounds(StatelessRounds):
    """Rounds of prompts in order of their predicted length, on-policy or partial. Groups are admitted whole; with
    ``single`` each trajectory is a group of its own."""

    drop_reason = DropReason.CUT

    def __init__(self, settings: ControlSettings) -> None:
        options = settings.length_sorted
        self._options = options
        self._batch = settings.batch_trajectories
        self.on_policy = not options.partial
        self.cut_tokens = options.cut_tokens
        self._sizes = settings.group_sizes
        self._predictor = PromptLengthPredictor()
        self._away = 0  # in their environments

    def launch(self, view: RoundView) -> Launch | None:
        if not view.at_barrier:
            return None
        size = self._size(view)
        if view.paused:
            return Launch(groups=view.paused, source=Source.PAUSED, size=0, group_size=size, round_kind=SORTED)
        if view.queued:
            varies = len(self._sizes) > 1
            queued = sum(ref.group_size == size for ref in view.queue) if varies else view.queued
            kept = 1 if self._options.single else size
            limit = round((self._options.oversubscription or self._options.cohort_batches) * view.batch_trajectories)
            limit += min(self._away, limit)  # those keep no engine busy; as many more can run once all come back
            groups = min(queued, (limit - view.untrained_trajectories) // view.trajectories_of(kept))
            if groups <= 0:
                return None
            return Launch(
                groups=groups,
                source=Source.QUEUE,
                size=kept,
                group_size=size,
                queued_at=size if varies else 0,
                round_kind=SORTED,
            )
        if view.untrained or view.exhausted:
            return None
        # To the end of a batch: a cohort that opens in the middle of one (groups were dropped) must not span one more.
        trajectories = view.missing + (self._options.cohort_batches - 1) * view.batch_trajectories
        prompts = max(trajectories // view.group_size, 1)
        copies = view.group_size if self._options.single else 1
        return Launch(groups=prompts, source=Source.COHORT, size=0, round_kind="", copies=copies)

    def _size(self, view: RoundView) -> int:
        """Size of the next groups. A cohort keeps its group size until it is trained: at another one its last prompts,
        which are long, would weigh more or less than its first, and it would be more batches, or fewer, than it was
        drawn for."""
        waiting = [ref.group_size for ref in view.queue]
        if len(self._sizes) == 1 or not waiting or (view.round_kind and view.group_size in waiting):
            return view.group_size
        return view.group_size if view.round_kind and view.untrained else waiting[0]

    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        if self.on_policy:
            return True
        return view.leaves_time_for_others(candidate)

    def remainder(self, view: RoundView) -> Remainder:
        return Remainder.PAUSE if self._options.partial else Remainder.REQUEUE

    def sorted_queue(self, queue: Sequence[PromptRef]) -> Sequence[PromptRef]:
        """Shortest prediction first, prompts that were launched before last. Stable."""
        predict = self._predictor.predict
        lengths = {ref.prompt_id: predict(ref.prompt_id, ref.tokens) for ref in queue}
        return sorted(queue, key=lambda ref: (ref.attempt, lengths[ref.prompt_id]))

    def observe(self, seen: Observation) -> None:
        """Learn from each group how long its prompt's completions are, and how many are in their environments."""
        if isinstance(seen, EnginesMeasured):
            self._away = seen.environment
        elif isinstance(seen, GroupObserved):
            longest = seen.cut_at if seen.cut else max(seen.lengths)
            self._predictor.observe(seen.prompt_id, seen.prompt_tokens, longest, cut=seen.cut)

    def snapshot(self) -> dict[str, object]:
        return msgspec.structs.asdict(self._predictor) | {"away": self._away}

    def restore(self, state: dict[str, object]) -> None:
        """The inverse; the state of another policy is ignored."""
        if "buckets" in state:
            self._predictor = msgspec.convert(state, PromptLengthPredictor, str_keys=True)
            self._away = msgspec.convert(state.get("away", 0), int)

    def slots(self) -> int:
        return self._options.cohort_batches * self._batch
