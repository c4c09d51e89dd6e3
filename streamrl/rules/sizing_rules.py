"""Rules of ``[group_sizing]``, and what varying group sizes need of the other sections."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from streamrl.recipe.algorithms import WITHIN_GROUPS, objective_settings
from streamrl.recipe.objective import AdvantageKind
from streamrl.recipe.problems import shown
from streamrl.recipe.scheduling import GroupSizing, RoundKind, SizingKind, StalePolicy
from streamrl.recipe.sections import Recipe

Broken = Iterator[tuple[str, str]]

SMALLEST_SIZE = 4
"""Of two rollouts the longest is less than twice the median, so that such a group would never straggle."""
OVER_THE_BATCH = frozenset({AdvantageKind.BATCH, AdvantageKind.COHORT})


def sizing_has_an_effect(recipe: Recipe) -> Broken:
    """Fields that the kind of sizing does not read. ``straggler_ratio`` is read by all: the rate is a metric."""
    sizing, default = recipe.group_sizing, GroupSizing()
    unread: set[str] = set()
    if sizing.kind is SizingKind.FIXED:
        unread = set(GroupSizing.__struct_fields__) - {"kind", "straggler_ratio"}
    elif sizing.kind is SizingKind.SAGC:
        unread = {"shares"}
    remedy = 'set group_sizing.kind = "sagc" or "random"' if sizing.kind is SizingKind.FIXED else 'set kind = "random"'
    for name in GroupSizing.__struct_fields__:
        if name in unread and (value := getattr(sizing, name)) != getattr(default, name):
            yield (
                f"group_sizing.{name}",
                f'{shown(value)} has no effect with group_sizing.kind = "{sizing.kind}": remove it, or {remedy}',
            )


def sizes_fit_the_batch(recipe: Recipe) -> Broken:
    """A batch is always as many trajectories, whatever the size: every size divides it."""
    sizing, rollout = recipe.group_sizing, recipe.rollout
    if sizing.kind is SizingKind.FIXED:
        return
    if len(sizing.sizes) < 2:
        yield (
            "group_sizing.sizes",
            f'{shown(list(sizing.sizes))} leaves nothing to choose: give two or more, or set kind = "fixed"',
        )
    if any(first >= second for first, second in pairwise(sizing.sizes)):
        yield (
            "group_sizing.sizes",
            f"{shown(list(sizing.sizes))} is not ascending: write each size once, smallest first",
        )
    for index, size in enumerate(sizing.sizes):
        if rollout.batch_trajectories % size:
            yield (
                f"group_sizing.sizes.{index}",
                (
                    f"{size} does not divide a batch of rollout.prompts_per_batch x group_size = "
                    f"{rollout.batch_trajectories} trajectories: choose a size that does, or another batch"
                ),
            )
    largest = max(sizing.sizes, default=1)
    updates, fewest = recipe.training.updates_per_batch, rollout.batch_trajectories // largest
    if updates > 1 and updates > fewest:
        yield (
            "training.updates_per_batch",
            (
                f"{updates} steps do not fit a batch of {fewest} groups of size {largest}, the largest of "
                f"group_sizing.sizes, since each step trains its share of them: set {max(fewest, 1)} or less"
            ),
        )


def sizes_show_stragglers(recipe: Recipe) -> Broken:
    """What the straggler-aware controller needs of its constants."""
    sizing, rollout = recipe.group_sizing, recipe.rollout
    if sizing.kind is not SizingKind.SAGC:
        return
    for index, size in enumerate(sizing.sizes):
        if size < SMALLEST_SIZE:
            yield (
                f"group_sizing.sizes.{index}",
                f"{size} is too small to show a straggler (longest against median): set it to {SMALLEST_SIZE} or more",
            )
    if rollout.group_size not in sizing.sizes:
        yield (
            "rollout.group_size",
            (
                f"{rollout.group_size}, which the run starts with, is none of group_sizing.sizes = "
                f"{shown(list(sizing.sizes))}: add it there, or start with one of them (and scale prompts_per_batch)"
            ),
        )
    if sizing.straggler_ratio <= 1:
        yield (
            "group_sizing.straggler_ratio",
            f"{shown(sizing.straggler_ratio)} makes every group a straggler: set it above 1, such as 2",
        )
    if sizing.tightening >= sizing.budget:
        yield (
            "group_sizing.tightening",
            f"{shown(sizing.tightening)} leaves nothing of budget = {shown(sizing.budget)}: set it lower, such as 0.02",
        )
    if sizing.calibration_steps >= recipe.run.steps:
        yield (
            "group_sizing.calibration_steps",
            f"{sizing.calibration_steps} leaves none of run.steps = {recipe.run.steps} to control: set it lower",
        )


def shares_for_chance(recipe: Recipe) -> Broken:
    """``kind = "random"``: one share for each size."""
    sizing = recipe.group_sizing
    if sizing.kind is not SizingKind.RANDOM:
        return
    if len(sizing.shares) != len(sizing.sizes):
        yield (
            "group_sizing.shares",
            f"has {len(sizing.shares)} entries for {len(sizing.sizes)} sizes: give the share of each",
        )
    for index, share in enumerate(sizing.shares):
        if share < 0:
            yield f"group_sizing.shares.{index}", f"{shown(share)} is negative: set it to 0 or more"
    if sizing.shares and all(share == 0 for share in sizing.shares):
        yield "group_sizing.shares", "every share is 0, so no size would be drawn: give at least one above 0"
    if objective_settings(recipe.objective).advantages not in WITHIN_GROUPS:
        return
    for index, size in enumerate(sizing.sizes):
        if size < 2:
            yield (
                f"group_sizing.sizes.{index}",
                f"{size} makes every advantage 0, because siblings are compared: set it to 2 or more",
            )


def sizes_mean_something(recipe: Recipe) -> Broken:
    """Sizes vary only where siblings are trained together, and where slots do not count on one size."""
    sizing, rollout = recipe.group_sizing, recipe.rollout
    if sizing.kind is SizingKind.FIXED:
        return
    advantages = objective_settings(recipe.objective).advantages
    if advantages in OVER_THE_BATCH:
        yield (
            "group_sizing.kind",
            (
                f'"{sizing.kind}" has no use with objective.advantages = "{advantages}", which compares with the batch '
                'whatever the group size: set kind = "fixed", or advantages = "group_then_batch"'
            ),
        )
    if rollout.rounds is RoundKind.LENGTH_SORTED and recipe.length_sorted.single:
        yield (
            "group_sizing.kind",
            f'"{sizing.kind}" has no use with length_sorted.single = true, which trains no groups: set one of them off',
        )
    if rollout.rounds is RoundKind.CONTINUOUS and rollout.when_stale is StalePolicy.WAIT:
        yield (
            "rollout.when_stale",
            (
                f'"wait" needs groups of one size in continuous rounds, and group_sizing.kind = "{sizing.kind}" varies '
                'it: set when_stale = "drop" or "regenerate", or kind = "fixed"'
            ),
        )
