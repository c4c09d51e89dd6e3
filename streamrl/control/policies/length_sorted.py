"""SortedRL's rounds (arXiv 2603.23414, section 3; ``rounds = "length_sorted"``): a cohort of prompts, whose running
trajectories are stopped as soon as a batch is ready. ``round_policies`` makes the policy; ``control.launch`` and
``control.decide`` ask it in the controller's process and in simulations (fields: ``control.round_policy``).

A cohort of n batches of prompts is loaded at once and oversubscribes the engines. The batch takes the groups that are
ready first, hence short completions. Then all running trajectories stop: they are sampled again from their start under
the next weights (on-policy), or continue from their tokens (partial). No new prompt is drawn until the cohort is
trained, so a prompt waits for at most n updates, and a partial trajectory has tokens of at most n versions. Prompts
whose completions are predicted to be short, by their history or their own length, are launched earlier (section 3 of
the paper)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import asdict

from streamrl.base.types import DropReason
from streamrl.buffers.rollout_buffer import PromptRef
from streamrl.control.events import EnginesMeasured
from streamrl.control.policies.length_prediction import PromptLengthPredictor
from streamrl.control.round_policy import (
    Candidate,
    GroupObserved,
    Launch,
    Observation,
    PolicyState,
    Remainder,
    RoundView,
    Source,
    StatelessRounds,
)
from streamrl.control.settings import ControlSettings

SORTED = "sorted"


class LengthSortedRounds(StatelessRounds):
    """Round policy that launches prompts in order of their predicted length, on-policy or partial. With ``single`` each
    trajectory is a group of its own; otherwise all trajectories of a group are launched together."""

    drop_reason = DropReason.BATCH_FULL  # of trajectories that are sampled again from their start

    def __init__(self, settings: ControlSettings) -> None:
        options = settings.length_sorted
        self._options = options
        self._batch = settings.batch_trajectories
        self.on_policy = not options.partial
        self.cut_tokens = options.cut_tokens
        self._sizes = settings.group_sizes
        self._predictor = PromptLengthPredictor()
        self._in_environments = 0

    def launch(self, view: RoundView) -> Launch | None:
        if not view.at_barrier:  # the batch takes no groups, or its version is not live yet
            return None
        size = self._size(view)
        if view.paused:  # size 0: groups that are resumed have a size already
            return Launch(groups=view.paused, source=Source.PAUSED, size=0, group_size=size, round_kind=SORTED)
        if view.queued:
            return self._launch_queued(view, size)
        if view.untrained or view.exhausted:
            return None
        # A cohort ends where a batch ends. After drops the open batch is partly filled: the cohort fills the rest of it
        # and cohort_batches - 1 batches more.
        trajectories = view.missing + (self._options.cohort_batches - 1) * view.batch_trajectories
        prompts = max(trajectories // view.group_size, 1)
        copies = view.group_size if self._options.single else 1
        # This launches nothing: prompts join the queue, each ``copies`` times, and the policy is asked again.
        return Launch(groups=prompts, source=Source.COHORT, size=0, round_kind="", copies=copies)

    def _launch_queued(self, view: RoundView, size: int) -> Launch | None:
        """Launch prompts of the queue at group size ``size``, as many as the oversubscription allows."""
        sizes_vary = len(self._sizes) > 1
        queued = sum(ref.group_size == size for ref in view.queue) if sizes_vary else view.queued
        launched_size = 1 if self._options.single else size
        limit = round((self._options.oversubscription or self._options.cohort_batches) * view.batch_trajectories)
        # Trajectories in environments keep no engine busy. At most doubled, for the time when all of them return.
        limit += min(self._in_environments, limit)
        groups = min(queued, (limit - view.untrained_trajectories) // view.trajectories_of(launched_size))
        if groups <= 0:
            return None
        return Launch(
            groups=groups,
            source=Source.QUEUE,
            size=launched_size,
            group_size=size,
            queued_at=size if sizes_vary else 0,
            round_kind=SORTED,
        )

    def _size(self, view: RoundView) -> int:
        """Size of the next groups. A cohort keeps its group size until it is trained. At another size its last prompts,
        which have long completions, would count for more or less than its first, and it would fill more or fewer
        batches than planned."""
        queued_sizes = [ref.group_size for ref in view.queue]
        if len(self._sizes) == 1 or not queued_sizes or (view.round_kind and view.group_size in queued_sizes):
            return view.group_size
        if view.round_kind and view.untrained:
            return view.group_size
        return queued_sizes[0]

    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        if self.on_policy:
            return True
        return view.leaves_time_for_others(candidate)  # all can be trained before they are too stale

    def remainder(self, view: RoundView) -> Remainder:
        return Remainder.PAUSE if self._options.partial else Remainder.REQUEUE

    def sorted_queue(self, queue: Sequence[PromptRef]) -> Sequence[PromptRef]:
        """Sort prompts by the number of their attempts, then by their predicted length. Stable."""
        predict = self._predictor.predict
        lengths = {ref.prompt_id: predict(ref.prompt_id, ref.tokens) for ref in queue}
        return sorted(queue, key=lambda ref: (ref.attempt, lengths[ref.prompt_id]))

    def observe(self, observation: Observation) -> None:
        """Learn the lengths of a prompt's completions, and the number of trajectories in environments."""
        if isinstance(observation, EnginesMeasured):
            self._in_environments = observation.environment
        elif isinstance(observation, GroupObserved):
            deferred = observation.deferred
            # A group that was stopped gives a lower bound of its length: the longest completion of its round.
            longest = observation.round_longest if deferred else max(observation.lengths)
            self._predictor.observe(observation.prompt_id, observation.prompt_tokens, longest, stopped=deferred)

    def snapshot(self) -> PolicyState:
        return asdict(self._predictor) | {"away": self._in_environments}

    def restore(self, state: PolicyState) -> None:
        """Restore the state of this policy; the state of another policy is ignored."""
        if "buckets" in state:
            self._predictor = msgspec.convert(state, PromptLengthPredictor, str_keys=True)
            self._in_environments = msgspec.convert(state.get("away", 0), int)

    def slots(self) -> int:
        """Return the number of trajectories of a whole cohort, which may all be in flight."""
        return self._options.cohort_batches * self._batch
