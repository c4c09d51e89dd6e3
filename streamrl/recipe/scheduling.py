"""``[rollout]`` and the sections of its policies: how rounds are formed, how large groups and how old tokens are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from streamrl.base.errors import RecipeError
from streamrl.recipe.fields import Factor, Natural, NaturalFloat, Positive, PositiveFloat, Section, Share, advanced, doc

SMALLEST_SIZE = 4
"""Of a group that may straggle: of two rollouts the longest is less than twice the median."""
WIDEST_AUTOMATIC_RACE = 1.5
"""Largest ``prompt_oversampling`` that rounds = "auto" chooses."""


class RoundKind(StrEnum):
    """Ways to form rounds. ``custom``: by the class that ``rollout.policy`` names."""

    SYNCHRONOUS = "synchronous"
    TAIL_BATCHING = "tail_batching"
    LENGTH_SORTED = "length_sorted"
    CONTINUOUS = "continuous"
    AUTO = "auto"
    CUSTOM = "custom"


class System(StrEnum):
    """A published system: the keys that its paper sets. A key beside it overrides, and the dry run prints all of them.

    ``rollpacker``: tail batching with both races (arXiv 2509.21009), adaptive limits of sandboxed code, streaming.
    ``sortedrl``, ``sortedrl_partial``: cohorts of single trajectories sorted by length, with REINFORCE++ (arXiv
    2603.23414). ``sagc``: group sizes chosen online (arXiv 2606.02218). ``fastest``: what was fastest here without
    stale tokens, which is none of the papers': ``auto`` rounds submitted in advance, verified deferred prompts, long
    rounds of four batches (all but the first of their four steps follow a gradient of weights that have moved).
    ``synchronous``: the baseline."""

    ROLLPACKER = "rollpacker"
    SORTEDRL = "sortedrl"
    SORTEDRL_PARTIAL = "sortedrl_partial"
    SAGC = "sagc"
    FASTEST = "fastest"
    SYNCHRONOUS = "synchronous"


class InFlight(StrEnum):
    """Handling of requests in flight at a weight update: keep their KV, recompute it, or cut and resume by tokens."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    RESUME = "resume"


class StalePolicy(StrEnum):
    """Policy for a trajectory that would become older than ``max_staleness``."""

    WAIT = "wait"
    DROP = "drop"
    REGENERATE = "regenerate"


class Rollout(Section, frozen=True):
    """Rounds and batches: one optimizer step consumes ``prompts_per_batch`` groups of ``group_size`` trajectories."""

    system: Annotated[System | None, doc("a published system in one line; in a file or in dicts")] = None
    prompts_per_batch: Annotated[Positive, doc("groups of a batch")] = 32
    group_size: Annotated[Positive, doc("completions of a prompt")] = 8
    rounds: Annotated[RoundKind, doc("")] = RoundKind.SYNCHRONOUS
    policy: Annotated[str, doc('module:Class or file.py:Class, for rounds = "custom"')] = ""
    max_staleness: Annotated[
        Natural,
        doc(
            "optimizer steps between the version that sampled a token and the one that trains it, at most; 0 is "
            "on-policy. It bounds how far sampling may run ahead of training, too"
        ),
    ] = 0
    in_flight: Annotated[InFlight, doc("")] = InFlight.KEEP
    when_stale: Annotated[StalePolicy, doc("")] = StalePolicy.WAIT
    dynamic_sampling: Annotated[
        bool | None, doc("groups of equal rewards are dropped and refilled (not set: as the algorithm's paper)")
    ] = None
    presubmit: Annotated[
        bool,
        advanced(
            "the next round's requests go to the paused engines while the step ends, and run once the new weights are "
            "live"
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.system is not None:  # reading takes it out: a struct cannot say which of its keys were written
            text = f'rollout.system: "{self.system}" is applied while a recipe is read: give a file or dicts'
            raise RecipeError(f"{text}, as in load_recipe({{..., 'rollout': {{'system': '{self.system}'}}}})")


class DeferredPrompts(StrEnum):
    """Sampling of deferred prompts: again from the start with a new seed; again with the *same* seeds (so that
    the length is not redrawn); the same, but tokens that the new weights choose again are not decoded again (strictly
    on-policy, as ``replay``, and cheaper; replayed with run.deterministic); or resumed from their tokens (off-policy by
    a version or more)."""

    REGENERATE = "regenerate"
    REPLAY = "replay"
    VERIFY = "verify"
    RESUME = "resume"


SAME_SEED = (DeferredPrompts.REPLAY, DeferredPrompts.VERIFY)


class TailBatching(Section, frozen=True):
    """RollPacker's rounds (arXiv 2509.21009, section 3): short rounds launch more prompts, and more responses of a
    prompt, than they train."""

    prompt_oversampling: Annotated[Factor, doc("prompts that a short round launches for one that it trains")] = 1.25
    response_oversampling: Annotated[Factor, doc("responses of a prompt; above 1 censors length inside of a group")] = (
        1.0
    )
    deferred_prompts: Annotated[DeferredPrompts, doc("")] = DeferredPrompts.REPLAY
    long_round_batches: Annotated[
        Positive, doc("batches of deferred prompts of one long round: as many optimizer steps along one gradient")
    ] = 1
    domain_column: Annotated[
        str, advanced("a prompt column; prompts are drawn so that its values have the shares of domains")
    ] = ""
    domains: Annotated[dict[str, PositiveFloat], advanced("the share of each value of domain_column")] = {}

    def verifies(self, *, deterministic: bool) -> bool:
        """Return whether deferred completions are verified. A deterministic run replays them: how far a race lets a
        completion come depends on time, and a prefill may round differently from decoding."""
        return self.deferred_prompts is DeferredPrompts.VERIFY and not deterministic


class LengthSorted(Section, frozen=True):
    """SortedRL's rounds (arXiv 2603.23414)."""

    cohort_batches: Annotated[Positive, doc("no new prompt is drawn until this many batches (n) are trained")] = 4
    partial: Annotated[
        bool,
        doc(
            "what is cut keeps its tokens and continues under the next weights (needs rollout.max_staleness of n - 1 "
            "or more); otherwise it is sampled again"
        ),
    ] = False
    cut_tokens: Annotated[
        Natural, advanced("close a batch also when its ready groups have this many tokens (0: never)")
    ] = 0
    oversubscription: Annotated[
        NaturalFloat, advanced("trajectories in flight as a multiple of a batch (0: the whole cohort)")
    ] = 0.0
    single: Annotated[bool, advanced("admit single trajectories, for baselines over the batch")] = False


def trains_on_policy(rollout: Rollout, tail_batching: TailBatching, length_sorted: LengthSorted) -> bool:
    """Return whether every token is trained by the version that sampled it. Custom rounds: where the bound is 0."""
    if rollout.rounds in (RoundKind.SYNCHRONOUS, RoundKind.AUTO):
        return True
    if rollout.rounds is RoundKind.TAIL_BATCHING:
        return tail_batching.deferred_prompts is not DeferredPrompts.RESUME
    if rollout.rounds is RoundKind.LENGTH_SORTED:
        return not length_sorted.partial
    return rollout.rounds is RoundKind.CUSTOM and rollout.max_staleness == 0


class SizingKind(StrEnum):
    """Source of the group size: the recipe, the straggler-aware controller, or chance (its control experiment)."""

    FIXED = "fixed"
    SAGC = "sagc"
    RANDOM = "random"


class Keeps(StrEnum):
    """Constant size of a batch at every group size: trajectories (prompts_per_batch x group_size), or prompts, so that
    smaller groups make smaller, shorter steps."""

    TRAJECTORIES = "trajectories"
    PROMPTS = "prompts"


class Straggler(StrEnum):
    """Quantity that is compared between siblings: sampled tokens, or the seconds of engine and reward from launch to
    score."""

    TOKENS = "tokens"
    SECONDS = "seconds"


CALIBRATION_STEPS = 8
SHORT_RUN = 100
"""Steps below which straggler-aware sizing holds its budget closer, for less utility."""


class GroupSizing(Section, frozen=True):
    """Straggler-aware group control, after arXiv 2606.02218 (its constants are not public: these are ours). Where no
    size meets the budget the smallest is taken, and the run says so. Where sizes vary, objective.advantages is
    "leave_one_out" unless set: steps of the algorithm's own would be larger or smaller with the group."""

    kind: Annotated[SizingKind, doc("")] = SizingKind.FIXED
    sizes: Annotated[tuple[Positive, ...], doc("candidates; each divides a batch of kept trajectories")] = (4, 8, 16)
    keeps: Annotated[Keeps, advanced("")] = Keeps.TRAJECTORIES
    straggler_ratio: Annotated[
        PositiveFloat,
        advanced("a group straggles when its longest completion is this many times its median one, or was truncated"),
    ] = 2.0
    budget: Annotated[
        float | None,
        doc(
            "the long-term share of such groups (not set: half-way between those of the smallest and the largest size, "
            'measured at the largest in the first steps; half of them are at the smallest where straggler = "seconds" '
            'and keeps = "prompts")'
        ),
    ] = None
    straggler: Annotated[Straggler, advanced("")] = Straggler.TOKENS
    tradeoff: Annotated[
        PositiveFloat | None,
        advanced("V: utility against budget (not set: 1, or 0.5 in a run of fewer than 100 steps)"),
    ] = None
    tightening: Annotated[NaturalFloat, advanced("taken off the budget")] = 0.02
    discount: Annotated[Share, advanced("of what was seen, a step")] = 0.95
    optimism: Annotated[NaturalFloat, advanced("of the estimate of a size's risk")] = 1.0
    dwell: Annotated[Positive, advanced("steps at one size, at least")] = 5
    calibration_steps: Annotated[
        Positive | None,
        advanced("first steps, in which a budget is measured (not set: 8, or a quarter of a short run)"),
    ] = None
    shares: Annotated[tuple[NaturalFloat, ...], advanced('of each of sizes, for kind = "random"')] = ()

    @property
    def varies(self) -> bool:
        """Return whether groups may have other sizes than ``rollout.group_size``."""
        return self.kind is not SizingKind.FIXED

    @property
    def keeps_prompts(self) -> bool:
        """Return whether batches are of so many groups, whatever their size."""
        return self.varies and self.keeps is Keeps.PROMPTS

    @property
    def informs_smaller(self) -> bool:
        """Return whether parts of a group tell how often smaller groups straggle: not in seconds where batches of
        smaller groups are smaller, since how long a member takes depends on how many others run."""
        return not (self.keeps_prompts and self.straggler is Straggler.SECONDS)

    def batches(self, prompts: int, size: int) -> tuple[tuple[int, int], ...]:
        """(groups, their size) of a batch, for each size that groups may have. ``prompts``, ``size``: of the recipe."""
        if not self.varies:
            return ((prompts, size),)
        return tuple((prompts if self.keeps_prompts else prompts * size // other, other) for other in self.sizes)

    def tradeoff_over(self, steps: int) -> float:
        """V in a run of so many steps."""
        return self.tradeoff or (0.5 if steps < SHORT_RUN else 1.0)

    def calibration_over(self, steps: int) -> int:
        """Steps of such a run in which the budget is measured; 0 where the recipe gives one."""
        if self.budget is not None:
            return 0
        return self.calibration_steps or max(1, min(CALIBRATION_STEPS, steps // 4))


def slots(rollout: Rollout, tail_batching: TailBatching, length_sorted: LengthSorted, group_sizing: GroupSizing) -> int:
    """Trajectories that may be in flight at once. A custom policy says so itself; here it counts as one batch and its
    staleness."""
    batches = group_sizing.batches(rollout.prompts_per_batch, rollout.group_size)
    batch = largest_batch(batches)
    if rollout.rounds is RoundKind.TAIL_BATCHING:
        count = tail_batching_slots(tail_batching, batches)
    elif rollout.rounds is RoundKind.LENGTH_SORTED:
        count = length_sorted.cohort_batches * batch
    elif rollout.rounds is RoundKind.AUTO:
        widest = TailBatching(
            prompt_oversampling=WIDEST_AUTOMATIC_RACE, long_round_batches=tail_batching.long_round_batches
        )
        count = tail_batching_slots(widest, batches)
    else:
        count = (rollout.max_staleness + 1) * batch
    # What is submitted in advance is in flight together with the batch that is being trained.
    return count * (2 if rollout.presubmit else 1)


def largest_batch(batches: Sequence[tuple[int, int]]) -> int:
    """Trajectories of a batch, at most; ``batches``: (groups, their size)."""
    return max((groups * size for groups, size in batches), default=0)


def tail_batching_slots(options: TailBatching, batches: Sequence[tuple[int, int]]) -> int:
    """Most slots in use: those of a race or of a long round, and, where deferred completions keep theirs, a batch and
    what one more race adds. ``batches``: (groups, their size)."""
    racing = max(
        math.ceil(options.prompt_oversampling * groups) * math.ceil(options.response_oversampling * size)
        for groups, size in batches
    )
    parked = 2 * racing if options.deferred_prompts is DeferredPrompts.RESUME else 0
    return max(racing, options.long_round_batches * largest_batch(batches)) + parked
