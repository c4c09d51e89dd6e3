"""Rules of ``[rollout]``, ``[tail_batching]`` and ``[length_sorted]``: what composes, what has no effect, what is
needed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from streamrl.recipe.algorithms import WITHIN_GROUPS, objective_settings
from streamrl.recipe.fields import Section
from streamrl.recipe.problems import shown
from streamrl.recipe.scheduling import (
    DeferredPrompts,
    InFlight,
    LengthSorted,
    RoundKind,
    SizingKind,
    StalePolicy,
    TailBatching,
)
from streamrl.recipe.sections import Recipe

Broken = Iterator[tuple[str, str]]

STRICT = frozenset({RoundKind.SYNCHRONOUS, RoundKind.AUTO})
READ_BY_AUTO = ("deferred_prompts", "long_round_batches")
"""Of ``[tail_batching]``: ``auto`` chooses the rest itself."""

_CLASS = re.compile(r"^.+:[A-Za-z_]\w*$")


def staleness_of_rounds(recipe: Recipe) -> Broken:
    """Each kind of round says what staleness it needs; none is given less."""
    rollout = recipe.rollout
    bound, kind = rollout.max_staleness, f'rounds = "{rollout.rounds}"'
    needed, why = 0, ""
    if rollout.rounds is RoundKind.CONTINUOUS:
        needed, why = 1, "which overlaps training with the next rollout"
    elif rollout.rounds is RoundKind.LENGTH_SORTED and recipe.length_sorted.partial:
        cohort = recipe.length_sorted.cohort_batches
        needed, why = cohort - 1, f"with length_sorted.partial, where a cohort of {cohort} batches is sampled on"
    elif rollout.rounds is RoundKind.TAIL_BATCHING and recipe.tail_batching.deferred_prompts is DeferredPrompts.RESUME:
        # What one race parks is trained by the next batches, one batch of it each.
        needed = max(1, math.ceil(recipe.tail_batching.prompt_oversampling - 1))
        why = 'with tail_batching.deferred_prompts = "resume", where losers keep their tokens'
    if bound < needed:
        yield (
            "rollout.max_staleness",
            f"{bound} does not fit {kind}, {why}: set max_staleness = {needed} or more",
        )
    if recipe.on_policy and bound > 0:
        other = 'rounds = "continuous"'
        yield (
            "rollout.max_staleness",
            f"{bound} does not fit {kind}, which trains at staleness 0: set max_staleness = 0, or {other}",
        )


def nothing_in_flight_at_an_update(recipe: Recipe) -> Broken:
    """Only continuous rounds update weights under requests in flight."""
    rollout = recipe.rollout
    if rollout.rounds in (RoundKind.CONTINUOUS, RoundKind.CUSTOM):
        return
    remedy = 'remove it, or set rounds = "continuous"'
    if rollout.in_flight is not InFlight.KEEP:
        yield (
            "rollout.in_flight",
            f'"{rollout.in_flight}" has no effect: {rollout.rounds} rounds have nothing in flight then; {remedy}',
        )
    if rollout.when_stale is not StalePolicy.WAIT and recipe.on_policy:
        yield (
            "rollout.when_stale",
            f'"{rollout.when_stale}" has no effect: nothing becomes stale in {rollout.rounds} rounds; {remedy}',
        )


def submitted_in_advance(recipe: Recipe) -> Broken:
    """Engines can only be held for a version where nothing runs meanwhile."""
    rollout = recipe.rollout
    if rollout.presubmit and not recipe.on_policy:
        yield (
            "rollout.presubmit",
            (
                f'true does not fit rounds = "{rollout.rounds}" at staleness {rollout.max_staleness}, whose engines '
                "are never held: set presubmit = false, or rounds that train on-policy"
            ),
        )


def custom_policy(recipe: Recipe) -> Broken:
    """``rollout.policy`` names a class, for custom rounds alone."""
    rollout = recipe.rollout
    custom = rollout.rounds is RoundKind.CUSTOM
    if custom and not _CLASS.match(rollout.policy):
        yield (
            "rollout.policy",
            f'"{rollout.policy}" does not name a class: write "module:Class" or "path/to/file.py:Class"',
        )
    if rollout.policy and not custom:
        yield "rollout.policy", f'has no effect with rounds = "{rollout.rounds}": remove it, or set rounds = "custom"'


def sections_of_other_rounds(recipe: Recipe) -> Broken:
    """A section that the chosen rounds do not read."""
    kind = recipe.rollout.rounds
    read = READ_BY_AUTO if kind is RoundKind.AUTO else ()
    yield from _unread(recipe.tail_batching, TailBatching(), "tail_batching", RoundKind.TAIL_BATCHING, kind, read)
    yield from _unread(recipe.length_sorted, LengthSorted(), "length_sorted", RoundKind.LENGTH_SORTED, kind)


def _unread(
    section: Section, default: Section, name: str, needs: RoundKind, kind: RoundKind, read: tuple[str, ...] = ()
) -> Broken:
    if kind in (needs, RoundKind.CUSTOM):
        return
    for field in section.__struct_fields__:
        value = getattr(section, field)
        if value != getattr(default, field) and field not in read:
            yield (
                f"{name}.{field}",
                f'{shown(value)} has no effect with rounds = "{kind}": remove it, or set rounds = "{needs}"',
            )


def races(recipe: Recipe) -> Broken:
    """Tail batching races something, and its options fit each other."""
    tail = recipe.tail_batching
    if recipe.rollout.rounds is RoundKind.AUTO and tail.deferred_prompts is DeferredPrompts.RESUME:
        yield (
            "tail_batching.deferred_prompts",
            '"resume" is off-policy, and rounds = "auto" is not: set "replay" or "regenerate"',
        )
    if recipe.rollout.rounds is not RoundKind.TAIL_BATCHING:
        return
    if tail.prompt_oversampling == 1 and tail.response_oversampling == 1:
        yield (
            "tail_batching.prompt_oversampling",
            '1 with response_oversampling = 1 races nothing: raise one of them, or set rounds = "synchronous"',
        )
    if bool(tail.domain_column) != bool(tail.domains):
        yield (
            "tail_batching.domains",
            "needs domain_column and domains: name the column of the prompts and the share of each of its values",
        )
    if tail.domains and tail.deferred_prompts is DeferredPrompts.RESUME:
        yield (
            "tail_batching.deferred_prompts",
            '"resume" does not keep the shares of domains: set "replay" or "regenerate"',
        )
    yield from _domains_have_seats(recipe)


def _domains_have_seats(recipe: Recipe) -> Broken:
    """A share that comes to less than one group would never be trained."""
    domains, sizing = recipe.tail_batching.domains, recipe.group_sizing
    largest = recipe.rollout.group_size if sizing.kind is SizingKind.FIXED else max(sizing.sizes)
    groups = recipe.rollout.batch_trajectories // largest
    for name, share in domains.items():
        if share / sum(domains.values()) * groups < 1:
            yield (
                f"tail_batching.domains.{name}",
                f"{share:g} is less than one of the {groups} groups of a batch: raise it, or rollout.prompts_per_batch",
            )


def cohorts(recipe: Recipe) -> Broken:
    """Length-sorted rounds admit what their advantages can use."""
    options = recipe.length_sorted
    if recipe.rollout.rounds is not RoundKind.LENGTH_SORTED:
        return
    advantages = objective_settings(recipe.objective).advantages
    if options.single and advantages in WITHIN_GROUPS:
        yield (
            "length_sorted.single",
            (
                f'true tears groups apart, and objective.advantages = "{advantages}" compares siblings: set '
                'single = false, or algorithm = "reinforce_plus_plus"'
            ),
        )
    if options.partial and options.cut_tokens:
        yield (
            "length_sorted.cut_tokens",
            (
                f"{options.cut_tokens} does not fit partial = true: batches that are cut by tokens are more than "
                f"cohort_batches = {options.cohort_batches}, and what waits for them is older than "
                "rollout.max_staleness: set cut_tokens = 0, or partial = false"
            ),
        )
    if 0 < options.oversubscription < 1:
        yield (
            "length_sorted.oversubscription",
            f"{options.oversubscription:g} would never fill a batch: set 1 or more, or 0 (the whole cohort)",
        )


def reproducible_rounds(recipe: Recipe) -> Broken:
    """What ``run.deterministic`` asks of rounds: decisions that outcomes alone lead to, and tokens that do not depend
    on when weights change (``policies/arrival_order.py``). For recipes that set it."""
    rollout, tail = recipe.rollout, recipe.tail_batching
    if rollout.rounds is RoundKind.AUTO:
        yield (
            "rollout.rounds",
            (
                '"auto" does not fit run.deterministic, since it chooses rounds by measured times: name the rounds, '
                'for example "synchronous", or set run.deterministic = false'
            ),
        )
    elif not recipe.on_policy:
        yield (
            "rollout.rounds",
            (
                f'"{rollout.rounds}" at staleness {rollout.max_staleness} does not fit run.deterministic, since which '
                "weights sample a token depends on when they change: choose rounds that train on-policy, or set "
                "run.deterministic = false"
            ),
        )
    if rollout.rounds is RoundKind.TAIL_BATCHING and tail.verifies:
        yield (
            "tail_batching.deferred_prompts",
            (
                '"verify" does not fit run.deterministic, since a run that goes on after a kill has no tokens to '
                'verify: set deferred_prompts = "replay", which draws the same'
            ),
        )
