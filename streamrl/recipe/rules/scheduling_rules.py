"""Rules of ``[rollout]``, ``[tail_batching]``, ``[length_sorted]`` and ``[group_sizing]``: settings that do not fit
together, and settings without an effect."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise

from streamrl.recipe.field_types import Section
from streamrl.recipe.problems import short_toml
from streamrl.recipe.rules.rule import Broken, Problem, has_no_effect, rule, unless
from streamrl.recipe.scheduling import (
    SMALLEST_SIZE,
    AdmissionKind,
    DeferredPrompts,
    GroupSizing,
    Keeps,
    KvAdmission,
    LengthSorted,
    RoundKind,
    SizingKind,
    Straggler,
    TailBatching,
)
from streamrl.recipe.sections import Recipe

_CLASS = re.compile(r"^.+:[A-Za-z_]\w*$")
_ROUNDS = ("rollout.rounds", "tail_batching", "length_sorted")


def _unless_rounds(*kinds: RoundKind) -> Callable[[Recipe], str]:
    """Return a ``why`` of ``has_no_effect`` for keys that only rounds of ``kinds`` and custom rounds read. The remedy
    is the first kind."""

    def why(recipe: Recipe) -> str:
        kind = recipe.rollout.rounds
        if kind in (*kinds, RoundKind.CUSTOM):
            return ""
        return f' with rounds = "{kind}": remove it, or set rounds = "{kinds[0]}"'

    return why


def _unless_sizing(*kinds: SizingKind) -> Callable[[Recipe], str]:
    """Return a ``why`` of ``has_no_effect`` for keys of ``[group_sizing]`` that only ``kinds`` read. All kinds read
    ``straggler_ratio`` and ``straggler``, because the share of stragglers is a metric."""

    def why(recipe: Recipe) -> str:
        kind = recipe.group_sizing.kind
        if kind in kinds:
            return ""
        remedy = 'group_sizing.kind = "sagc" or "random"' if kind is SizingKind.FIXED else 'kind = "random"'
        return f' with group_sizing.kind = "{kind}": remove it, or set {remedy}'

    return why


def _unless_continuous(recipe: Recipe, reason: str) -> str:
    """Return ``reason`` and the remedy for rounds that are neither continuous nor custom, else an empty text."""
    rounds = recipe.rollout.rounds
    if rounds in (RoundKind.CONTINUOUS, RoundKind.CUSTOM):
        return ""
    return f': {reason} {rounds} rounds; remove it, or set rounds = "continuous"'


def _nothing_in_flight(recipe: Recipe) -> str:
    """Return the reason why ``in_flight`` has no effect; empty: it has one."""
    return _unless_continuous(recipe, "nothing is in flight at an update in")


def _nothing_stale(recipe: Recipe) -> str:
    """Return the reason why ``when_stale`` has no effect; empty: it has one."""
    if not recipe.on_policy:
        return ""
    return _unless_continuous(recipe, "nothing becomes stale in")


def _keys(section: str, struct: type[Section], *excluded: str) -> str:
    """Paths of the keys of a section for ``has_no_effect``, without ``excluded``."""
    return " ".join(f"{section}.{name}" for name in struct.__struct_fields__ if name not in excluded)


READ_BY_AUTO = ("deferred_prompts", "long_round_batches")
"""Keys of ``[tail_batching]`` that rounds = "auto" reads; it chooses the others itself."""
TAIL = RoundKind.TAIL_BATCHING
AUTO = RoundKind.AUTO
has_no_effect(_keys("tail_batching", TailBatching, *READ_BY_AUTO), _unless_rounds(TAIL), *_ROUNDS)
has_no_effect(" ".join(f"tail_batching.{name}" for name in READ_BY_AUTO), _unless_rounds(TAIL, AUTO), *_ROUNDS)
has_no_effect(_keys("length_sorted", LengthSorted), _unless_rounds(RoundKind.LENGTH_SORTED), *_ROUNDS)
has_no_effect("rollout.in_flight", _nothing_in_flight, *_ROUNDS)
has_no_effect("rollout.when_stale", _nothing_stale, *_ROUNDS)
has_no_effect(
    _keys("kv_admission", KvAdmission),
    unless(
        lambda recipe: recipe.rollout.admission is AdmissionKind.KV,
        ' with rollout.admission = "slots": remove it, or set rollout.admission = "kv"',
    ),
    "rollout.admission",
)
OF_VARIED_SIZES = ("sizes", "keeps", "dwell")
"""Keys of ``[group_sizing]`` that every kind with several sizes reads."""
has_no_effect(
    _keys("group_sizing", GroupSizing, "kind", "straggler_ratio", "straggler", *OF_VARIED_SIZES, "shares"),
    _unless_sizing(SizingKind.SAGC),
)
has_no_effect(
    " ".join(f"group_sizing.{name}" for name in OF_VARIED_SIZES), _unless_sizing(SizingKind.SAGC, SizingKind.RANDOM)
)
has_no_effect("group_sizing.shares", _unless_sizing(SizingKind.RANDOM))


@rule("rollout.rounds", "tail_batching", "length_sorted", "rollout.max_staleness")
def staleness_of_rounds(recipe: Recipe) -> Broken:
    """``max_staleness`` must be as large as the kind of rounds needs, and 0 for rounds that train on-policy."""
    rollout = recipe.rollout
    bound = rollout.max_staleness
    kind = f'rounds = "{rollout.rounds}"'
    needed = 0
    why = ""
    if rollout.rounds is RoundKind.CONTINUOUS:
        needed = 1
        why = "which overlaps training with the next rollout"
    elif rollout.rounds is RoundKind.LENGTH_SORTED and recipe.length_sorted.partial:
        cohort = recipe.length_sorted.cohort_batches
        needed = cohort - 1
        why = f"with length_sorted.partial, where a cohort of {cohort} batches is sampled on"
    elif rollout.rounds is RoundKind.TAIL_BATCHING and recipe.tail_batching.deferred_prompts is DeferredPrompts.RESUME:
        # Each of the next batches trains one batch of the trajectories that a race pauses.
        needed = max(1, math.ceil(recipe.tail_batching.prompt_oversampling - 1))
        why = 'with tail_batching.deferred_prompts = "resume", where deferred prompts keep their tokens'
    if bound < needed:
        yield Problem(
            "rollout.max_staleness", f"{bound} does not fit {kind}, {why}: set max_staleness = {needed} or more"
        )
    if recipe.on_policy and bound > 0:
        other = 'rounds = "continuous"'
        yield Problem(
            "rollout.max_staleness",
            f"{bound} does not fit {kind}, which trains at staleness 0: set max_staleness = 0, or {other}",
        )


@rule("rollout.rounds", "tail_batching", "length_sorted", "rollout.presubmit")
def submitted_in_advance(recipe: Recipe) -> Broken:
    """Requests can be submitted in advance only where the engines are paused between rounds."""
    rollout = recipe.rollout
    if rollout.presubmit and not recipe.on_policy:
        yield Problem(
            "rollout.presubmit",
            f'true does not fit rounds = "{rollout.rounds}" at staleness {rollout.max_staleness}, whose engines '
            "are never held: set presubmit = false, or rounds that train on-policy",
        )


@rule("rollout.rounds", "rollout.policy")
def custom_policy(recipe: Recipe) -> Broken:
    """``rollout.policy`` must name a class for custom rounds, and be empty for others."""
    rollout = recipe.rollout
    custom = rollout.rounds is RoundKind.CUSTOM
    if custom and not _CLASS.match(rollout.policy):
        yield Problem(
            "rollout.policy",
            f'"{rollout.policy}" does not name a class: write "module:Class" or "path/to/file.py:Class"',
        )
    if rollout.policy and not custom:
        yield Problem(
            "rollout.policy", f'has no effect with rounds = "{rollout.rounds}": remove it, or set rounds = "custom"'
        )


@rule("rollout.rounds", "tail_batching", "length_sorted", "rollout", "group_sizing")
def races(recipe: Recipe) -> Broken:
    """Tail batching must launch more than it trains, and its options must fit together."""
    tail = recipe.tail_batching
    if recipe.rollout.rounds is RoundKind.AUTO and tail.deferred_prompts is DeferredPrompts.RESUME:
        yield Problem(
            "tail_batching.deferred_prompts",
            '"resume" is off-policy, and rounds = "auto" is not: set "replay" or "regenerate"',
        )
    if recipe.rollout.rounds is not RoundKind.TAIL_BATCHING:
        return
    if tail.prompt_oversampling == 1 and tail.response_oversampling == 1:
        yield Problem(
            "tail_batching.prompt_oversampling",
            '1 with response_oversampling = 1 races nothing: raise one of them, or set rounds = "synchronous"',
        )


@rule("rollout.rounds", "tail_batching", "length_sorted", "objective")
def cohorts(recipe: Recipe) -> Broken:
    """Length-sorted rounds must fit the objective's advantages, and their options must fit together."""
    options = recipe.length_sorted
    if recipe.rollout.rounds is not RoundKind.LENGTH_SORTED:
        return
    settings = recipe.objective_settings
    if options.single and settings.estimator.compares_siblings:
        yield Problem(
            "length_sorted.single",
            f'true takes groups apart, and objective.advantages = "{settings.advantages}" compares siblings: set '
            'single = false, or algorithm = "reinforce_plus_plus"',
        )
    if options.partial and options.cut_tokens:
        yield Problem(
            "length_sorted.cut_tokens",
            f"{options.cut_tokens} does not fit partial = true: batches that are cut by tokens are more than "
            f"cohort_batches = {options.cohort_batches}, and what waits for them is older than "
            "rollout.max_staleness: set cut_tokens = 0, or partial = false",
        )
    if 0 < options.oversubscription < 1:
        yield Problem(
            "length_sorted.oversubscription",
            f"{options.oversubscription:g} would never fill a batch: set 1 or more, or 0 (the whole cohort)",
        )


@rule("rollout.admission", "kv_admission", *_ROUNDS)
def admission(recipe: Recipe) -> Broken:
    """Admission by KV caches pauses trajectories, whose tokens are then of several versions."""
    options = recipe.admission
    if options is None:
        return
    if recipe.rollout.rounds is not RoundKind.CONTINUOUS:
        yield Problem(
            "rollout.admission",
            f'"kv" does not fit rounds = "{recipe.rollout.rounds}": trajectories that are paused go on under later '
            'weights; set admission = "slots", or rounds = "continuous"',
        )
    if options.soft_mark >= options.hard_mark:
        yield Problem(
            "kv_admission.soft_mark",
            f"{options.soft_mark:g} is not below hard_mark = {options.hard_mark:g}: what is resumed would be paused "
            "at once; set a lower soft_mark",
        )


@rule("run.deterministic", "group_sizing.straggler", *_ROUNDS)
def reproducible_rounds(recipe: Recipe) -> Broken:
    """A deterministic run (``control/policies/deterministic.py``) needs decisions that depend on outcomes alone, not on
    times, and tokens that do not depend on the time of a weight update."""
    rollout = recipe.rollout
    if not recipe.run.deterministic:
        return
    if rollout.rounds is RoundKind.AUTO:
        yield Problem(
            "rollout.rounds",
            '"auto" does not fit run.deterministic, since it chooses rounds by measured times: name the rounds, '
            'for example "synchronous", or set run.deterministic = false',
        )
    elif not recipe.on_policy:
        yield Problem(
            "rollout.rounds",
            f'"{rollout.rounds}" at staleness {rollout.max_staleness} does not fit run.deterministic, since which '
            "weights sample a token depends on when they change: choose rounds that train on-policy, or set "
            "run.deterministic = false",
        )
    if recipe.group_sizing.straggler is Straggler.SECONDS:
        yield Problem(
            "group_sizing.straggler",
            '"seconds" does not fit run.deterministic, since measured times choose the group size: set "tokens"',
        )


@rule("group_sizing", "rollout", "training.updates_per_batch")
def sizes_fit_the_batch(recipe: Recipe) -> Broken:
    """Group sizes must be several, in ascending order, and divide a batch with a constant number of trajectories."""
    sizing = recipe.group_sizing
    rollout = recipe.rollout
    if not sizing.varies:
        return
    if len(sizing.sizes) < 2:
        yield Problem(
            "group_sizing.sizes",
            f'{short_toml(list(sizing.sizes))} leaves nothing to choose: give two or more, or set kind = "fixed"',
        )
    if any(first >= second for first, second in pairwise(sizing.sizes)):
        yield Problem(
            "group_sizing.sizes",
            f"{short_toml(list(sizing.sizes))} is not ascending: write each size once, smallest first",
        )
    if sizing.keeps is Keeps.PROMPTS:
        return
    batch = rollout.prompts_per_batch * rollout.group_size
    for index, size in enumerate(sizing.sizes):
        if batch % size:
            yield Problem(
                f"group_sizing.sizes.{index}",
                f"{size} does not divide a batch of rollout.prompts_per_batch x group_size = {batch} trajectories: "
                'choose a size that does, another batch, or advanced.keeps = "prompts"',
            )
    largest = max(sizing.sizes, default=1)
    updates = recipe.training.updates_per_batch
    fewest = batch // largest
    if updates > 1 and updates > fewest:
        yield Problem(
            "training.updates_per_batch",
            f"{updates} steps do not fit a batch of {fewest} groups of size {largest}, the largest of "
            f"group_sizing.sizes, since each step trains its share of them: set {max(fewest, 1)} or less",
        )


@rule("group_sizing", "rollout", "run.steps", "training.epochs", "objective")
def sizes_show_stragglers(recipe: Recipe) -> Broken:
    """Constants of the straggler-aware controller must be in the range in which it works."""
    sizing = recipe.group_sizing
    rollout = recipe.rollout
    if sizing.kind is not SizingKind.SAGC:
        return
    tracks_prompts = recipe.objective_settings.estimator.tracks_prompts
    for index, size in enumerate(sizing.sizes):
        if size < SMALLEST_SIZE and not tracks_prompts:
            yield Problem(
                f"group_sizing.sizes.{index}",
                f"{size} is too small to show a straggler (longest against median): set it to {SMALLEST_SIZE} or more, "
                'or objective.advantages = "tracked", which needs no siblings',
            )
    if rollout.group_size not in sizing.sizes:
        yield Problem(
            "rollout.group_size",
            f"{rollout.group_size}, which the run starts with, is none of group_sizing.sizes = "
            f"{short_toml(list(sizing.sizes))}: add it there, or start with one of them (and scale prompts_per_batch)",
        )
    if sizing.straggler_ratio <= 1:
        yield Problem(
            "group_sizing.straggler_ratio",
            f"{short_toml(sizing.straggler_ratio)} makes every group a straggler: set it above 1, such as 2",
        )
    if sizing.budget is not None and not 0 < sizing.budget < 1:
        yield Problem(
            "group_sizing.budget",
            f"{short_toml(sizing.budget)} is no share of groups that could be kept: set it above 0 and below 1, or "
            "remove "
            "it, so that it is measured",
        )
    elif sizing.budget is not None and sizing.tightening >= sizing.budget:
        yield Problem(
            "group_sizing.tightening",
            f"{short_toml(sizing.tightening)} leaves nothing of budget = {short_toml(sizing.budget)}: set it lower, "
            "such as 0.02",
        )
    if sizing.calibration_steps and sizing.budget is not None:
        yield Problem(
            "group_sizing.calibration_steps",
            f"{sizing.calibration_steps} has no effect with group_sizing.budget = {short_toml(sizing.budget)}: remove "
            "one",
        )
    elif (sizing.calibration_steps or 0) >= recipe.run.steps and not recipe.training.epochs:
        yield Problem(
            "group_sizing.calibration_steps",
            f"{sizing.calibration_steps} leaves none of run.steps = {recipe.run.steps} to control: set it lower",
        )


@rule("group_sizing", "objective")
def shares_for_chance(recipe: Recipe) -> Broken:
    """``kind = "random"`` needs one share for each size, and sizes with siblings to compare."""
    sizing = recipe.group_sizing
    if sizing.kind is not SizingKind.RANDOM:
        return
    if len(sizing.shares) != len(sizing.sizes):
        yield Problem(
            "group_sizing.shares",
            f"has {len(sizing.shares)} entries for {len(sizing.sizes)} sizes: give the share of each",
        )
    if sizing.shares and all(share == 0 for share in sizing.shares):
        yield Problem("group_sizing.shares", "every share is 0, so no size would be drawn: give at least one above 0")
    if not recipe.objective_settings.estimator.compares_siblings:
        return
    for index, size in enumerate(sizing.sizes):
        if size < 2:
            yield Problem(
                f"group_sizing.sizes.{index}",
                f"{size} makes every advantage 0, because siblings are compared: set it to 2 or more",
            )


@rule("group_sizing", "rollout", "length_sorted", "objective")
def sizes_mean_something(recipe: Recipe) -> Broken:
    """Group sizes may vary only where siblings are compared or trained together."""
    sizing = recipe.group_sizing
    if not sizing.varies:
        return
    settings = recipe.objective_settings
    if settings.estimator.whole_batch and not settings.estimator.compares_siblings and not settings.has_critic:
        yield Problem(
            "group_sizing.kind",
            f'"{sizing.kind}" has no use with objective.advantages = "{settings.advantages}", which compares with '
            'the batch whatever the group size: set kind = "fixed", or advantages = "group_then_batch"',
        )
    if recipe.rollout.rounds is RoundKind.LENGTH_SORTED and recipe.length_sorted.single:
        yield Problem(
            "group_sizing.kind",
            f'"{sizing.kind}" has no use with length_sorted.single = true, which trains no groups: set one of them off',
        )
