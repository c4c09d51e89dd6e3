"""The recipe's ``[rollout]``, ``[tail_batching]``, ``[length_sorted]`` and ``[group_sizing]``: kinds of rounds, sizes
of groups and limits of staleness. Control (``control``) and simulations read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from streamrl.base.errors import RecipeError
from streamrl.recipe.field_types import Factor, Natural, NaturalFloat, Positive, PositiveFloat, Section, Share, advanced

SMALLEST_SIZE = 4
"""Smallest size of a group that may straggle: of two completions the longer is less than twice the median."""
WIDEST_AUTOMATIC_RACE = 1.5
"""Largest ``prompt_oversampling`` that rounds = "auto" chooses."""


class RoundKind(StrEnum):
    """Kind of rounds. ``custom``: rounds of the class that ``rollout.policy`` names."""

    SYNCHRONOUS = "synchronous"
    TAIL_BATCHING = "tail_batching"
    LENGTH_SORTED = "length_sorted"
    CONTINUOUS = "continuous"
    AUTO = "auto"
    CUSTOM = "custom"


class System(StrEnum):
    """A published system, which sets the keys of its paper. Keys of the recipe override them, and the dry run prints
    all.

    ``rollpacker``: tail batching with both races (arXiv 2509.21009), adaptive limits of sandboxed code, streaming.
    ``sortedrl``, ``sortedrl_partial``: cohorts of single trajectories sorted by length, with REINFORCE++ (arXiv
    2603.23414). ``sagc``: group sizes chosen online (arXiv 2606.02218). ``fastest``: the fastest settings in our
    measurements without stale tokens, which are no paper's: ``auto`` rounds submitted in advance, verified deferred
    prompts, long rounds of four batches (all but the first of their four steps follow a gradient of weights that have
    moved). ``synchronous``: the baseline."""

    ROLLPACKER = "rollpacker"
    SORTEDRL = "sortedrl"
    SORTEDRL_PARTIAL = "sortedrl_partial"
    SAGC = "sagc"
    FASTEST = "fastest"
    SYNCHRONOUS = "synchronous"


class InFlight(StrEnum):
    """Handling of requests in flight at a weight update: keep their KV cache, recompute it, or abort them and resume
    from their tokens."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    RESUME = "resume"


class AdmissionKind(StrEnum):
    """Limit of the trajectories in flight. ``slots``: the number that staleness allows; ``kv``: also as many as the KV
    caches of the engines hold from turn to turn (``[kv_admission]``)."""

    SLOTS = "slots"
    KV = "kv"


class KvAdmission(Section, frozen=True):
    """Admission by KV caches: pauses the trajectories with the shortest contexts before engines preempt requests, and
    resumes them with their turns (as prime-rl's concurrency control and ThunderAgent, arXiv 2602.13692)."""

    soft_mark: Annotated[
        Share, advanced, "used share of the KV caches below which paused trajectories that fit are resumed"
    ] = 0.8
    hard_mark: Annotated[Share, advanced, "used share from which the shortest contexts are paused"] = 0.9
    growth: Annotated[
        Factor, advanced, "factor of the limit of trajectories once as many have ended as may be in flight"
    ] = 1.25


AdmissionOptions = KvAdmission | None
"""Options of the admission that a recipe chooses; None: it is off, and as many trajectories as there are slots are
admitted."""


class StalePolicy(StrEnum):
    """Policy for a trajectory that would exceed ``max_staleness``."""

    WAIT = "wait"
    DROP = "drop"
    REGENERATE = "regenerate"


class Rollout(Section, frozen=True):
    """Rounds and batches. One optimizer step trains ``prompts_per_batch`` groups of ``group_size`` trajectories."""

    system: Annotated[System | None, "a published system, whose keys it sets; in a file or in dicts"] = None
    prompts_per_batch: Annotated[Positive, "groups of a batch"] = 32
    group_size: Annotated[Positive, "completions of a prompt"] = 8
    rounds: RoundKind = RoundKind.SYNCHRONOUS
    policy: Annotated[str, 'module:Class or file.py:Class, for rounds = "custom"'] = ""
    max_staleness: Annotated[
        Natural,
        "limit of the optimizer steps between the version that sampled a token and the version that trains it; 0 "
        "is on-policy. It also bounds how far sampling may run ahead of training",
    ] = 0
    admission: AdmissionKind = AdmissionKind.SLOTS
    in_flight: InFlight = InFlight.KEEP
    when_stale: StalePolicy = StalePolicy.WAIT
    dynamic_sampling: Annotated[
        bool | None, "groups of equal rewards are dropped and replaced (not set: as in the algorithm's paper)"
    ] = None
    presubmit: Annotated[
        bool,
        advanced,
        "the next round's requests are sent to the paused engines while the step ends, and run once the new "
        "weights are live",
    ] = False

    def __post_init__(self) -> None:
        if self.system is not None:  # ``rules.systems`` removes it: a struct does not know which keys were written
            text = f'rollout.system: "{self.system}" is applied while a recipe is read: give a file or dicts'
            raise RecipeError(f"{text}, as in load_recipe({{..., 'rollout': {{'system': '{self.system}'}}}})")


class DeferredPrompts(StrEnum):
    """Sampling of deferred prompts. ``regenerate``: sampling from the start with a new seed. ``replay``: sampling from
    the start with the same seeds, so that the length is not drawn again. ``verify``: ``replay``, but tokens that the
    new weights choose again are not decoded again (strictly on-policy and cheaper; ``replay`` with run.deterministic).
    ``resume``: sampling continues from their tokens (off-policy by a version or more)."""

    REGENERATE = "regenerate"
    REPLAY = "replay"
    VERIFY = "verify"
    RESUME = "resume"


SAME_SEED = (DeferredPrompts.REPLAY, DeferredPrompts.VERIFY)


class TailBatching(Section, frozen=True):
    """RollPacker's rounds (arXiv 2509.21009, section 3): short rounds launch more prompts, and more responses of a
    prompt, than they train."""

    prompt_oversampling: Annotated[Factor, "prompts that a short round launches for each one that it trains"] = 1.25
    response_oversampling: Annotated[
        Factor, "responses that it launches for each one that it trains; above 1 censors length within a group"
    ] = 1.0
    deferred_prompts: DeferredPrompts = DeferredPrompts.REPLAY
    long_round_batches: Annotated[
        Positive,
        "batches of deferred prompts in one long round, which makes as many optimizer steps along one gradient",
    ] = 1

    def verifies(self, *, deterministic: bool) -> bool:
        """Return whether deferred completions are verified. A deterministic run replays them: the length of a
        completion that a race ends depends on time, and a prefill may round differently from decoding."""
        return self.deferred_prompts is DeferredPrompts.VERIFY and not deterministic


class LengthSorted(Section, frozen=True):
    """SortedRL's rounds (arXiv 2603.23414)."""

    cohort_batches: Annotated[
        Positive, "batches (n) of a cohort: no new prompt is drawn until all of them are trained"
    ] = 4
    partial: Annotated[
        bool,
        "unfinished trajectories keep their tokens and continue under the next weights (needs "
        "rollout.max_staleness of n - 1 or more); otherwise they are sampled again",
    ] = False
    cut_tokens: Annotated[
        Natural, advanced, "tokens of the ready groups at which a batch is closed, too (0: never)"
    ] = 0
    oversubscription: Annotated[
        NaturalFloat, advanced, "trajectories in flight as a multiple of a batch (0: the whole cohort)"
    ] = 0.0
    single: Annotated[bool, advanced, "admit single trajectories, for baselines over the batch"] = False


def trains_on_policy(rollout: Rollout, tail_batching: TailBatching, length_sorted: LengthSorted) -> bool:
    """Return whether every token is trained by the version that sampled it; for custom rounds, whether
    ``max_staleness`` is 0."""
    if rollout.rounds in (RoundKind.SYNCHRONOUS, RoundKind.AUTO):
        return True
    if rollout.rounds is RoundKind.TAIL_BATCHING:
        return tail_batching.deferred_prompts is not DeferredPrompts.RESUME
    if rollout.rounds is RoundKind.LENGTH_SORTED:
        return not length_sorted.partial
    return rollout.rounds is RoundKind.CUSTOM and rollout.max_staleness == 0


class SizingKind(StrEnum):
    """Source of the group size: the recipe, the straggler-aware controller, or chance (the control experiment)."""

    FIXED = "fixed"
    SAGC = "sagc"
    RANDOM = "random"


class Keeps(StrEnum):
    """Size of a batch that every group size keeps: trajectories (prompts_per_batch x group_size), or prompts, so that
    smaller groups make smaller, shorter steps."""

    TRAJECTORIES = "trajectories"
    PROMPTS = "prompts"


class Straggler(StrEnum):
    """Quantity that siblings are compared by: sampled tokens, or seconds from launch to score (engine and reward)."""

    TOKENS = "tokens"
    SECONDS = "seconds"


CALIBRATION_STEPS = 8
SHORT_RUN = 100
"""Length of a run in steps below which straggler-aware sizing keeps closer to its budget, for less utility."""


class GroupSizing(Section, frozen=True):
    """Straggler-aware group control, after arXiv 2606.02218 (its constants are not public: these are ours). Where no
    size meets the budget, the smallest is taken, with a warning. Where sizes vary, objective.advantages is
    "leave_one_out" unless it is set: the algorithm's own advantages would scale with the size of the group."""

    kind: SizingKind = SizingKind.FIXED
    sizes: Annotated[
        tuple[Positive, ...], 'candidates; each divides the trajectories of a batch, unless keeps = "prompts"'
    ] = (4, 8, 16)
    keeps: Annotated[Keeps, advanced] = Keeps.TRAJECTORIES
    straggler_ratio: Annotated[
        PositiveFloat,
        advanced,
        "a group straggles when its longest completion is this many times its median one, or was truncated",
    ] = 2.0
    budget: Annotated[
        float | None,
        "long-term share of straggling groups (not set: half-way between the shares of the smallest and the "
        'largest size, measured at the largest in the first steps; where straggler = "seconds" and keeps = '
        '"prompts", half of these steps are at the smallest)',
    ] = None
    straggler: Annotated[Straggler, advanced] = Straggler.TOKENS
    tradeoff: Annotated[
        PositiveFloat | None,
        advanced,
        "V, the weight of utility against the budget (not set: 1, or 0.5 in a run of fewer than 100 steps)",
    ] = None
    tightening: Annotated[NaturalFloat, advanced, "margin below the budget"] = 0.02
    discount: Annotated[Share, advanced, "discount of earlier observations in each step"] = 0.95
    optimism: Annotated[NaturalFloat, advanced, "optimism of the estimate of a size's risk"] = 1.0
    dwell: Annotated[Positive, advanced, "least number of steps at one size"] = 5
    calibration_steps: Annotated[
        Positive | None, advanced, "first steps, which measure the budget (not set: 8, or a quarter of a short run)"
    ] = None
    shares: Annotated[tuple[NaturalFloat, ...], advanced, 'share of each of sizes, for kind = "random"'] = ()

    @property
    def varies(self) -> bool:
        """Whether groups may have other sizes than ``rollout.group_size``."""
        return self.kind is not SizingKind.FIXED

    @property
    def keeps_prompts(self) -> bool:
        """Whether batches have the same number of groups at every group size."""
        return self.varies and self.keeps is Keeps.PROMPTS

    @property
    def informs_smaller(self) -> bool:
        """Whether parts of a group show how often smaller groups straggle. Seconds do not where smaller groups make
        smaller batches, because the time of a member depends on the number of the others that run."""
        return not (self.keeps_prompts and self.straggler is Straggler.SECONDS)

    def batches(self, prompts: int, size: int) -> tuple[tuple[int, int], ...]:
        """Return (number of groups, group size) of a batch, for each size that groups may have. ``prompts``, ``size``:
        the recipe's ``prompts_per_batch`` and ``group_size``."""
        if not self.varies:
            return ((prompts, size),)
        if self.keeps_prompts:
            return tuple((prompts, other_size) for other_size in self.sizes)
        return tuple((prompts * size // other_size, other_size) for other_size in self.sizes)

    def tradeoff_over(self, steps: int) -> float:
        """Return V for a run of ``steps``."""
        return self.tradeoff or (0.5 if steps < SHORT_RUN else 1.0)

    def calibration_over(self, steps: int) -> int:
        """Return the steps of a run of ``steps`` that measure the budget; 0 where the recipe sets one."""
        if self.budget is not None:
            return 0
        return self.calibration_steps or max(1, min(CALIBRATION_STEPS, steps // 4))


def slots(rollout: Rollout, tail_batching: TailBatching, length_sorted: LengthSorted, group_sizing: GroupSizing) -> int:
    """Return the largest number of trajectories in flight. Custom rounds count like continuous ones, although their
    policy may have another limit."""
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
    # With presubmit the next round's trajectories are in flight together with the batch that is being trained.
    return count * (2 if rollout.presubmit else 1)


def largest_batch(batches: Sequence[tuple[int, int]]) -> int:
    """Return the largest number of trajectories of a batch. ``batches``: (number of groups, group size)."""
    return max((groups * size for groups, size in batches), default=0)


def tail_batching_slots(options: TailBatching, batches: Sequence[tuple[int, int]]) -> int:
    """Return the largest number of slots in use by tail batching: those of a race or of a long round, and, where
    deferred completions keep their slots, those of two more races. ``batches``: (number of groups, group size)."""
    racing = max(
        math.ceil(options.prompt_oversampling * groups) * math.ceil(options.response_oversampling * size)
        for groups, size in batches
    )
    parked = 2 * racing if options.deferred_prompts is DeferredPrompts.RESUME else 0
    return max(racing, options.long_round_batches * largest_batch(batches)) + parked
