"""Rules inside ``[objective]`` and ``[off_policy]``, and what they need of the other sections.

A field that has no effect is refused where somebody who wrote it would rely on it; a default never is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from streamrl.recipe.algorithms import WITHIN_GROUPS, objective_settings
from streamrl.recipe.objective import (
    AdvantageKind,
    KlEstimator,
    KlPlace,
    Objective,
    OffPolicy,
    Proximal,
    RatioLevel,
    Surrogate,
)
from streamrl.recipe.problems import shown
from streamrl.recipe.sections import Recipe

Broken = Iterator[tuple[str, str]]


def _changed(section: Objective | OffPolicy, *names: str) -> Iterator[tuple[str, Any]]:
    """(name, value) of those fields that differ from their default."""
    default = type(section)()
    for name in names:
        if (value := getattr(section, name)) != getattr(default, name):
            yield name, value


def groups_have_a_baseline(recipe: Recipe) -> Broken:
    """A group of one has no siblings to be compared with, and equal rewards always."""
    if recipe.rollout.group_size > 1:
        return
    kind = objective_settings(recipe.objective).advantages
    if kind in WITHIN_GROUPS:
        yield (
            "rollout.group_size",
            (
                f'1 with objective.advantages = "{kind}" makes every advantage 0, because siblings are compared: '
                'set group_size = 2 or more, or advantages = "batch"'
            ),
        )
    elif recipe.dynamic_sampling:
        yield (
            "rollout.dynamic_sampling",
            (
                "true drops groups of equal rewards, which is every group of group_size = 1: "
                "set dynamic_sampling = false, or group_size = 2 or more"
            ),
        )


def clips(recipe: Recipe) -> Broken:
    """Clip fields that the surrogate does not read, and bounds that cut what must stay."""
    objective = recipe.objective
    surrogate = objective_settings(objective).surrogate
    if surrogate is Surrogate.POLICY_GRADIENT:
        for name, value in _changed(objective, "clip_low", "clip_high"):
            yield (
                f"objective.{name}",
                (
                    f'{shown(value)} has no effect: surrogate = "policy_gradient" is not clipped; '
                    'remove it, or set surrogate = "token_clip"'
                ),
            )
    if 0 < objective.dual_clip <= 1:
        yield (
            "objective.dual_clip",
            f"{shown(objective.dual_clip)} clips on-policy tokens (r = 1): set it above 1, such as 3, or remove it",
        )
    elif objective.dual_clip and surrogate not in (Surrogate.TOKEN_CLIP, Surrogate.SEQUENCE_CLIP):
        yield (
            "objective.dual_clip",
            (
                f'{shown(objective.dual_clip)} has no effect: surrogate = "{surrogate}" has no dual clip; '
                'remove it, or set surrogate = "token_clip"'
            ),
        )


def reference_kl(recipe: Recipe) -> Broken:
    """KL fields without a coefficient; an estimator that is no penalty where it stands; policies cut by top-p."""
    objective = recipe.objective
    settings = objective_settings(objective)
    if not settings.has_reference:
        for name, value in _changed(objective, "kl_estimator", "kl_in"):
            yield (
                f"objective.{name}",
                f"{shown(value)} has no effect while kl_coefficient = 0: remove it, or set kl_coefficient",
            )
    elif settings.kl_estimator is KlEstimator.K1 and settings.kl_in is KlPlace.LOSS:
        # The gradient of log pi - log reference is the score, whose mean is 0 (arXiv 2506.09477, section 3).
        yield (
            "objective.kl_estimator",
            (
                'k1 in the loss has a gradient of mean 0, so that it holds the policy nowhere: set kl_estimator = "k2" '
                'or "k3", or kl_in = "reward"'
            ),
        )
    if settings.has_reference and recipe.sampling.top_p < 1:
        yield (
            "objective.kl_coefficient",
            (
                f"{shown(objective.kl_coefficient)} has no KL to estimate with sampling.top_p = "
                f"{shown(recipe.sampling.top_p)}, which cuts policy and reference to different tokens: "
                "set sampling.top_p = 1, or remove kl_coefficient"
            ),
        )


def advantage_fields(recipe: Recipe) -> Broken:
    """Fields of the critic and of the cohort where there is none."""
    objective = recipe.objective
    kind = objective_settings(objective).advantages
    owners = {
        AdvantageKind.GAE: ("discount", "gae_lambda", "value_coefficient", "value_clip", "value_learning_rate"),
        AdvantageKind.COHORT: ("cohort_batches",),
    }
    for owner, names in owners.items():
        for name, value in _changed(objective, *names) if kind is not owner else ():
            yield (
                f"objective.{name}",
                (
                    f'{shown(value)} has no effect with advantages = "{kind}": '
                    f'remove it, or set objective.advantages = "{owner}"'
                ),
            )
    if kind is AdvantageKind.GAE and objective.value_coefficient == 0:
        yield (
            "objective.value_coefficient",
            '0 never trains the value head that advantages = "gae" reads: set it above 0, such as 0.5',
        )


def overlong(recipe: Recipe) -> Broken:
    """DAPO's soft punishment needs a length that is not punished, and a penalty."""
    objective, limit = recipe.objective, recipe.sampling.max_tokens
    if objective.overlong_buffer >= limit:
        yield (
            "objective.overlong_buffer",
            f"{objective.overlong_buffer} leaves no length unpunished: set it below sampling.max_tokens = {limit}",
        )
    if objective.overlong_buffer and objective.overlong_penalty == 0:
        yield (
            "objective.overlong_penalty",
            "0 makes overlong_buffer have no effect: raise it, or remove overlong_buffer",
        )
    if not objective.overlong_buffer and objective.overlong_penalty != Objective().overlong_penalty:
        yield (
            "objective.overlong_penalty",
            (
                f"{shown(objective.overlong_penalty)} has no effect while overlong_buffer = 0: "
                "remove it, or set overlong_buffer to the tokens before sampling.max_tokens that are punished"
            ),
        )


def correction_bounds(recipe: Recipe) -> Broken:
    """An on-policy token, w = 1, is neither cut nor masked."""
    off_policy = recipe.off_policy
    if off_policy.truncate is RatioLevel.NONE:
        for name, value in _changed(off_policy, "cap"):
            yield f"off_policy.{name}", f'{shown(value)} has no effect with truncate = "none": remove one of them'
    elif off_policy.cap < 1:
        yield (
            "off_policy.cap",
            f"{shown(off_policy.cap)} would shrink the weight of on-policy tokens (w = 1): set it to 1 or more",
        )
    if off_policy.mask is RatioLevel.NONE:
        for name, value in _changed(off_policy, "mask_low", "mask_high"):
            yield (
                f"off_policy.{name}",
                f'{shown(value)} has no effect with mask = "none": remove it, or set mask = "token"',
            )
        return
    if off_policy.mask_low > 1:
        yield "off_policy.mask_low", f"{shown(off_policy.mask_low)} masks on-policy tokens (w = 1): set it to 1 or less"
    if off_policy.mask_high < 1:
        yield (
            "off_policy.mask_high",
            f"{shown(off_policy.mask_high)} masks on-policy tokens (w = 1): set it to 1 or more",
        )
    if off_policy.mask_low >= off_policy.mask_high:
        yield (
            "off_policy.mask_low",
            f"{shown(off_policy.mask_low)} is not below mask_high = {shown(off_policy.mask_high)}: lower it",
        )


def corrections_have_work(recipe: Recipe) -> Broken:
    """Corrections that never see a token they could correct: see ``learning.corrections``."""
    off_policy = recipe.off_policy
    fresh = f"{recipe.rollout.rounds} rounds train every token by the version that sampled it"
    continuous = 'set rollout.rounds = "continuous"'
    weights: tuple[str, ...] = ("truncate", "cap", "mask")
    if recipe.on_policy:
        yield from _without_effect(off_policy, ("proximal", "staleness_discount"), fresh, continuous)
        if not off_policy.correct_mismatch:
            yield from _without_effect(off_policy, weights, fresh, f"set correct_mismatch = true, or {continuous}")
    elif off_policy.proximal is Proximal.BEHAVIOR and not off_policy.correct_mismatch:
        why = 'proximal = "behavior" makes w = 1 for stale tokens'
        yield from _without_effect(off_policy, weights, why, 'set proximal = "decoupled"')


def _without_effect(section: OffPolicy, names: tuple[str, ...], why: str, remedy: str) -> Broken:
    for name, value in _changed(section, *names):
        if value is not RatioLevel.NONE:
            yield f"off_policy.{name}", f"{shown(value)} has no effect: {why}; remove it, or {remedy}"
