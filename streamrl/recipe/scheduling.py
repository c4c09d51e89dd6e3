"""``[rollout]`` and the sections of its policies: how rounds are formed, how large groups and how old tokens are."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from streamrl.recipe.objective import Natural, NaturalFloat, Positive, PositiveFloat, Section, Share

Factor = Annotated[float, Meta(ge=1)]

WIDEST_AUTOMATIC_RACE = 1.5
"""Largest ``prompt_oversampling`` that rounds = "auto" chooses."""


class RoundKind(StrEnum):
    """How rounds are formed. ``custom``: by the class that ``rollout.policy`` names."""

    SYNCHRONOUS = "synchronous"
    TAIL_BATCHING = "tail_batching"
    LENGTH_SORTED = "length_sorted"
    CONTINUOUS = "continuous"
    AUTO = "auto"
    CUSTOM = "custom"


class InFlight(StrEnum):
    """What a weight update does to requests in flight: keep their KV, recompute it, or cut and resume by tokens."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    RESUME = "resume"


class StalePolicy(StrEnum):
    """What happens to a trajectory that would become older than ``max_staleness``."""

    WAIT = "wait"
    DROP = "drop"
    REGENERATE = "regenerate"


class Rollout(Section, frozen=True):
    """One optimizer step consumes ``prompts_per_batch`` groups of ``group_size`` trajectories.

    ``max_staleness``: optimizer steps between the version that sampled a token and the one that trains it, at most; 0
    is on-policy. It bounds how far sampling may run ahead of training, too.
    ``dynamic_sampling``: groups of equal rewards are dropped and refilled; None: what the algorithm's paper says.
    ``presubmit``: the next round's requests go to the paused engines while the step ends, and run once the new weights
    are live. ``policy``: ``module:Class`` or ``file.py:Class``, for rounds = "custom".
    """

    prompts_per_batch: Positive = 32
    group_size: Positive = 8
    rounds: RoundKind = RoundKind.SYNCHRONOUS
    policy: str = ""
    max_staleness: Natural = 0
    in_flight: InFlight = InFlight.KEEP
    when_stale: StalePolicy = StalePolicy.WAIT
    dynamic_sampling: bool | None = None
    presubmit: bool = False

    @property
    def batch_trajectories(self) -> int:
        """Trajectories in one batch."""
        return self.prompts_per_batch * self.group_size


class DeferredPrompts(StrEnum):
    """What becomes of a prompt that lost a race: sampled again from its start with a new seed; again with the *same*
    seeds (so that its length is not redrawn); the same, but what the new weights choose again of the tokens that it had
    is not decoded again (strictly on-policy, as ``replay``, and cheaper); or resumed from its tokens (off-policy by a
    version or more)."""

    REGENERATE = "regenerate"
    REPLAY = "replay"
    VERIFY = "verify"
    RESUME = "resume"


SAME_NOISE = (DeferredPrompts.REPLAY, DeferredPrompts.VERIFY)


class TailBatching(Section, frozen=True):
    """RollPacker's rounds (arXiv 2509.21009, section 4). ``prompt_oversampling``, ``response_oversampling``: how many
    more prompts, and responses of a prompt, a short round launches than it keeps; ``response_oversampling`` above 1
    censors length inside of a group. ``long_round_batches``: batches of queued prompts that one long round trains at
    once, as so many steps. ``domain_column``: a prompt column; every round keeps the dataset's shares of its values
    (see ``domains``).
    """

    prompt_oversampling: Factor = 1.25
    response_oversampling: Factor = 1.0
    deferred_prompts: DeferredPrompts = DeferredPrompts.REPLAY
    long_round_batches: Positive = 1
    domain_column: str = ""
    domains: dict[str, PositiveFloat] = {}

    @property
    def verifies(self) -> bool:
        """Whether tokens of losers are kept."""
        return self.deferred_prompts is DeferredPrompts.VERIFY


class LengthSorted(Section, frozen=True):
    """SortedRL's rounds (arXiv 2603.23414). ``cohort_batches`` (n): no new prompt is drawn until n batches are trained.
    ``partial``: what is cut keeps its tokens and goes on under the next weights (needs
    ``rollout.max_staleness`` of n - 1 or more); otherwise it is sampled again. ``cut_tokens``: close a batch also when
    its ready groups have so many tokens (0: never). ``oversubscription``: trajectories in flight as a multiple of a
    batch (0: the whole cohort). ``single``: admit single trajectories, for baselines over the batch.
    """

    cohort_batches: Positive = 4
    partial: bool = False
    cut_tokens: Natural = 0
    oversubscription: NaturalFloat = 0.0
    single: bool = False


def trains_on_policy(rollout: Rollout, tail_batching: TailBatching, length_sorted: LengthSorted) -> bool:
    """Whether every token is trained by the version that sampled it. Custom rounds: where the bound is 0."""
    if rollout.rounds in (RoundKind.SYNCHRONOUS, RoundKind.AUTO):
        return True
    if rollout.rounds is RoundKind.TAIL_BATCHING:
        return tail_batching.deferred_prompts is not DeferredPrompts.RESUME
    if rollout.rounds is RoundKind.LENGTH_SORTED:
        return not length_sorted.partial
    return rollout.rounds is RoundKind.CUSTOM and rollout.max_staleness == 0


class SizingKind(StrEnum):
    """Who chooses the group size: the recipe, the straggler-aware controller, or chance (its control experiment)."""

    FIXED = "fixed"
    SAGC = "sagc"
    RANDOM = "random"


class GroupSizing(Section, frozen=True):
    """Straggler-aware group control, after arXiv 2606.02218 (its constants are not public: these are ours).

    ``sizes``: candidates; each divides the trajectories of a batch. A group straggles when its longest completion is
    ``straggler_ratio`` times its median one or was truncated; the long-term share of such groups stays within
    ``budget``. ``tradeoff`` (V): utility against budget; ``tightening``, ``discount``, ``optimism``, ``dwell`` (steps):
    see ``streamrl.policies.group_sizing``. Where no size meets the budget the smallest is taken, and the run says so.
    ``calibration_steps``: steps at the largest size first, after which a ``budget`` that no size or every size meets is
    replaced, and told. ``shares``: of each of ``sizes``, for ``kind = "random"``.
    """

    kind: SizingKind = SizingKind.FIXED
    sizes: tuple[Positive, ...] = (4, 8, 16)
    straggler_ratio: PositiveFloat = 2.0
    budget: Share = 0.3
    tradeoff: PositiveFloat = 1.0
    tightening: NaturalFloat = 0.02
    discount: Share = 0.95
    optimism: NaturalFloat = 1.0
    dwell: Positive = 5
    calibration_steps: Natural = 0
    shares: tuple[float, ...] = ()


def slots(rollout: Rollout, tail_batching: TailBatching, length_sorted: LengthSorted, group_sizing: GroupSizing) -> int:
    """Trajectories that may be in flight at once. A custom policy says so itself; here it counts as one batch and its
    staleness."""
    batch = rollout.batch_trajectories
    if rollout.rounds is RoundKind.TAIL_BATCHING:
        count = tail_batching_slots(tail_batching, batch, _sizes(rollout, group_sizing))
    elif rollout.rounds is RoundKind.LENGTH_SORTED:
        count = length_sorted.cohort_batches * batch
    elif rollout.rounds is RoundKind.AUTO:
        widest = TailBatching(
            prompt_oversampling=WIDEST_AUTOMATIC_RACE, long_round_batches=tail_batching.long_round_batches
        )
        count = tail_batching_slots(widest, batch, _sizes(rollout, group_sizing))
    else:
        count = (rollout.max_staleness + 1) * batch
    # What is submitted in advance is in flight together with the batch that is being trained.
    return count * (2 if rollout.presubmit else 1)


def _sizes(rollout: Rollout, group_sizing: GroupSizing) -> tuple[int, ...]:
    return (rollout.group_size,) if group_sizing.kind is SizingKind.FIXED else group_sizing.sizes


def tail_batching_slots(options: TailBatching, batch: int, sizes: tuple[int, ...]) -> int:
    """What races, or runs in a long round; parked losers keep theirs: a batch, and what one more race adds, at most."""
    racing = max(
        math.ceil(options.prompt_oversampling * (batch // size)) * math.ceil(options.response_oversampling * size)
        for size in sizes
    )
    parked = 2 * racing if options.deferred_prompts is DeferredPrompts.RESUME else 0
    return max(racing, options.long_round_batches * batch) + parked
