"""Rules of ``[objective]`` and ``[off_policy]``, and between them and other sections. A value without an effect is
refused unless it is the default."""

from __future__ import annotations

from collections.abc import Callable

from streamrl.base.types import TokenDistribution
from streamrl.recipe.environment import Credit
from streamrl.recipe.field_types import keys_of
from streamrl.recipe.objective import KlEstimator, Mask, Proximal, RatioLevel
from streamrl.recipe.objectives.method import KlPlace, Surrogate
from streamrl.recipe.objectives.ppo import CriticKeys
from streamrl.recipe.objectives.spo import TrackedBaseline
from streamrl.recipe.problems import short_toml
from streamrl.recipe.rules.rule import Broken, Problem, has_no_effect, rule, unless
from streamrl.recipe.sections import Recipe


def _unless_surrogate(
    condition: Callable[[Surrogate], bool], property_text: str, instead: str = "token_clip"
) -> Callable[[Recipe], str]:
    """Return a ``why`` of ``has_no_effect`` for keys that only some surrogates read. ``condition``: whether a surrogate
    reads them; ``property_text``: predicate about the others; ``instead``: a surrogate that reads them."""

    def why(recipe: Recipe) -> str:
        settings = recipe.objective_settings
        if condition(settings.token_surrogate):
            return ""
        return f': surrogate = "{settings.surrogate}" {property_text}; remove it, or set surrogate = "{instead}"'

    return why


def _unless_advantages(kind: str) -> Callable[[Recipe], str]:
    """Return a ``why`` of ``has_no_effect`` for keys that only the advantages ``kind`` read."""

    def why(recipe: Recipe) -> str:
        advantages = recipe.objective_settings.advantages
        if advantages == kind:
            return ""
        return f' with advantages = "{advantages}": remove it, or set objective.advantages = "{kind}"'

    return why


def _corrections(recipe: Recipe, *, stale_only: bool) -> str:
    """Return the reason why ``learning.objective.corrections`` never corrects a token; empty: it may. ``stale_only``:
    whether the key concerns stale tokens alone."""
    off_policy = recipe.off_policy
    rounds = recipe.rollout.rounds
    if recipe.on_policy and (stale_only or not off_policy.corrects_mismatch):
        remedies = ['rollout.rounds = "continuous"']
        if not stale_only:
            remedies.insert(0, "correct_mismatch = true")
        why = f"{rounds} rounds train every token by the version that sampled it"
        return f": {why}; remove it, or set {', or '.join(remedies)}"
    # At a staleness of 1 the interpolated policy is the one that sampled.
    of_behavior = off_policy.proximal is Proximal.BEHAVIOR or (
        off_policy.proximal is Proximal.INTERPOLATED and recipe.rollout.max_staleness <= 1
    )
    if not stale_only and not recipe.on_policy and of_behavior and not off_policy.corrects_mismatch:
        return (
            f': proximal = "{off_policy.proximal}" makes w = 1 for stale tokens (max_staleness = '
            f'{recipe.rollout.max_staleness}); remove it, or set proximal = "decoupled"'
        )
    return ""


def _truncation(recipe: Recipe) -> str:
    """Return the reason why ``truncate`` has no effect; empty: it has one, or it is off."""
    if recipe.off_policy.truncate is RatioLevel.NONE:
        return ""
    return _corrections(recipe, stale_only=False)


has_no_effect(
    "objective.clip_low objective.clip_high", _unless_surrogate(lambda surrogate: surrogate.clips, "is not clipped")
)
has_no_effect(
    "objective.soft_gate",
    _unless_surrogate(lambda surrogate: surrogate.name == "soft_gate", "has no gate", "soft_gate"),
)
has_no_effect(
    "objective.function objective.options",
    unless(
        lambda recipe: recipe.objective_settings.is_custom,
        ': surrogate and advantages are of the catalog; remove it, or leave surrogate out, or set it to "custom"',
    ),
)
has_no_effect("objective.dual_clip", _unless_surrogate(lambda surrogate: surrogate.dual_clips, "has no dual clip"))
has_no_effect(
    "objective.kl_estimator objective.kl_in",
    unless(
        lambda recipe: recipe.objective.kl_coefficient, " while kl_coefficient = 0: remove it, or set kl_coefficient"
    ),
)
has_no_effect(
    "objective.reference",
    unless(
        lambda recipe: recipe.objective_settings.has_reference,
        " while nothing is compared with it: remove it, or set kl_coefficient or distillation_coefficient",
    ),
)
has_no_effect(" ".join(f"objective.{key}" for key in CriticKeys.__struct_fields__), _unless_advantages("gae"))
has_no_effect("objective.cohort_batches", _unless_advantages("cohort"))
has_no_effect(
    "objective.divergence",
    unless(
        lambda recipe: recipe.objective_settings.distils,
        " while distillation_coefficient = 0: remove it, or set distillation_coefficient",
    ),
)
has_no_effect(
    "objective.divergence_beta",
    unless(
        lambda recipe: recipe.objective_settings.exact_divergence,
        ': only divergence = "exact" has a mixture; remove it, or set divergence = "exact"',
    ),
)
has_no_effect(
    "objective.overlong_buffer",
    unless(
        lambda recipe: recipe.objective_settings.estimator.of_rewards,
        ': advantages = "teacher" reads no rewards; remove it, or set distillation_coefficient in another algorithm',
    ),
)
has_no_effect(
    "objective.overlong_penalty",
    unless(
        lambda recipe: recipe.objective.overlong_buffer,
        " while overlong_buffer = 0: remove it, or set overlong_buffer to the last tokens that are punished",
    ),
)
has_no_effect(
    "off_policy.cap",
    unless(
        lambda recipe: recipe.off_policy.truncate is not RatioLevel.NONE, ' with truncate = "none": remove one of them'
    ),
)
has_no_effect(
    "off_policy.mask_low off_policy.mask_high",
    unless(
        lambda recipe: recipe.off_policy.mask is not Mask.NONE, ' with mask = "none": remove it, or set mask = "token"'
    ),
)
has_no_effect(
    "off_policy.truncate off_policy.cap",
    unless(
        lambda recipe: recipe.off_policy.mask is not Mask.ICEPOP,
        ' with mask = "icepop", which weighs each token by its w: remove it, or set mask = "token"',
    ),
)
has_no_effect(
    "off_policy.proximal off_policy.staleness_discount",
    lambda recipe: _corrections(recipe, stale_only=True),
    "rollout.rounds",
)
has_no_effect("off_policy.cap off_policy.mask", lambda recipe: _corrections(recipe, stale_only=False), "rollout.rounds")
has_no_effect("off_policy.truncate", _truncation, "rollout.rounds")


@rule("rollout.group_size", "rollout.dynamic_sampling", "objective")
def groups_have_a_baseline(recipe: Recipe) -> Broken:
    """A group of one trajectory has no siblings for a comparison, and its rewards are always equal."""
    if recipe.rollout.group_size > 1:
        return
    settings = recipe.objective_settings
    if settings.estimator.compares_siblings:
        yield Problem(
            "rollout.group_size",
            f'1 with objective.advantages = "{settings.advantages}" makes every advantage 0, because siblings are '
            'compared: set group_size = 2 or more, or advantages = "batch"',
        )
    elif recipe.dynamic_sampling:
        yield Problem(
            "rollout.dynamic_sampling",
            "true drops groups of equal rewards, which is every group of group_size = 1: "
            "set dynamic_sampling = false, or group_size = 2 or more",
        )


@rule("objective", "environment", "rollout")
def tracked_baselines(recipe: Recipe) -> Broken:
    """A baseline of the prompt is for the total reward of a trajectory, and its bounds must be in order."""
    settings = recipe.objective_settings
    rule_of_baselines = settings.tracked
    if not settings.estimator.tracks_prompts:
        if rule_of_baselines != TrackedBaseline():
            yield Problem(
                "objective.tracked",
                f'has no effect with advantages = "{settings.advantages}": set advantages = "tracked", or remove '
                "[objective.advanced.tracked]",
            )
        return
    if recipe.dynamic_sampling and recipe.rollout.group_size > 1:
        yield Problem(
            "rollout.dynamic_sampling",
            'true drops groups of equal rewards, which advantages = "tracked" trains and learns from: remove it',
        )
    if rule_of_baselines.least_memory > rule_of_baselines.most_memory:
        yield Problem(
            "objective.tracked.least_memory",
            f"{rule_of_baselines.least_memory:g} is above most_memory = {rule_of_baselines.most_memory:g}: lower it",
        )
    if recipe.environment.credit is not Credit.TRAJECTORY:
        yield Problem(
            "environment.credit",
            f'"{recipe.environment.credit}" compares turns of siblings, and advantages = "tracked" compares the total '
            'reward with the prompt\'s: set credit = "trajectory", or advantages = "group_std"',
        )


@rule("objective")
def custom_code_has_a_name(recipe: Recipe) -> Broken:
    """A loss or advantages of the user's own are an object of a module or of a file."""
    module, _, name = recipe.objective.function.rpartition(":")
    if recipe.objective_settings.is_custom and not (module and name.isidentifier()):
        yield Problem(
            "objective.function",
            f'"{recipe.objective.function}" does not name a function: write "module:name" or "path/to/file.py:name"',
        )


@rule("objective", "sampling", "prompts.train")
def values_with_an_effect(recipe: Recipe) -> Broken:
    """Clips must leave on-policy tokens; a KL needs a gradient and policies over all tokens; a critic must be trained;
    DAPO's soft punishment needs lengths that are not punished, and a penalty."""
    objective = recipe.objective
    settings = recipe.objective_settings
    limit = min(map(recipe.token_limit, recipe.prompts.sets.values()), default=recipe.max_tokens)
    if 0 < objective.dual_clip <= 1:
        yield Problem(
            "objective.dual_clip",
            f"{short_toml(objective.dual_clip)} clips on-policy tokens (r = 1): set it above 1, such as 3, or remove "
            "it",
        )
    if settings.kl_coefficient > 0 and settings.kl_estimator is KlEstimator.K1 and settings.kl_in is KlPlace.LOSS:
        # The gradient of log pi - log reference is the score, whose mean is 0 (arXiv 2506.09477, section 3).
        yield Problem(
            "objective.kl_estimator",
            'k1 in the loss has a gradient of mean 0, so that it holds the policy nowhere: set kl_estimator = "k2" '
            'or "k3", or kl_in = "reward"',
        )
    for coefficient in ("kl_coefficient", "distillation_coefficient"):
        weight = getattr(settings, coefficient)
        for key in keys_of(TokenDistribution).values():
            name = key.name
            value = getattr(recipe.sampling, name)
            if weight > 0 and name != "temperature" and value != key.default:
                yield Problem(
                    f"objective.{coefficient}",
                    f"{short_toml(weight)} has no KL to estimate with sampling.{name} = {short_toml(value)}, which "
                    f"cuts policy and reference to different tokens: set sampling.{name} = {key.default:g}, or remove "
                    f"{coefficient}",
                )
    if settings.has_critic and objective.value_coefficient == 0:
        yield Problem(
            "objective.value_coefficient",
            '0 never trains the value head that advantages = "gae" reads: set it above 0, such as 0.5',
        )
    if objective.overlong_buffer >= limit:
        yield Problem(
            "objective.overlong_buffer",
            f"{objective.overlong_buffer} leaves no length unpunished: set it below {limit}, the limit of a trajectory",
        )
    if objective.overlong_buffer and objective.overlong_penalty == 0:
        yield Problem(
            "objective.overlong_penalty", "0 makes overlong_buffer have no effect: raise it, or remove overlong_buffer"
        )


@rule("objective", "rollout.dynamic_sampling")
def distillation_trains(recipe: Recipe) -> Broken:
    """A method without rewards needs a coefficient, and groups that are trained whatever their rewards are."""
    settings = recipe.objective_settings
    if settings.estimator.of_rewards:
        return
    if not settings.distils:
        yield Problem(
            "objective.distillation_coefficient",
            f'0 with advantages = "{settings.advantages}" trains nothing: set it above 0, such as 1',
        )
    if recipe.dynamic_sampling:
        yield Problem(
            "rollout.dynamic_sampling",
            f'true drops groups of equal rewards, which advantages = "{settings.advantages}" trains: remove it',
        )
    if settings.penalizes_reward:
        yield Problem(
            "objective.kl_in",
            f'"{settings.kl_in}" has no effect with advantages = "{settings.advantages}", which reads no rewards: '
            'set "loss"',
        )


@rule("objective", "environment.credit")
def rewards_are_whole(recipe: Recipe) -> Broken:
    """Advantages that divide by a mean reward cannot take punishments, and parts of rewards that may be below 0;
    baselines of prompts are means of rewards as control knows them, without punishments."""
    settings = recipe.objective_settings
    name = f'advantages = "{settings.advantages}"'
    if settings.estimator.positive_rewards:
        reason = f"{name} divides by the mean reward, which must not be below 0"
    elif settings.estimator.tracks_prompts:
        reason = f"{name} compares them with rewards that control keeps, from which nothing is subtracted"
    else:
        return
    if settings.overlong_buffer:
        yield Problem(
            "objective.overlong_buffer", f"{settings.overlong_buffer} subtracts from rewards, and {reason}: remove it"
        )
    if settings.penalizes_reward:
        yield Problem("objective.kl_in", f'"{settings.kl_in}" subtracts from rewards, and {reason}: set "loss"')
    if settings.estimator.positive_rewards and recipe.environment.credit is not Credit.TRAJECTORY:
        yield Problem(
            "environment.credit",
            f'"{recipe.environment.credit}" divides rewards into parts, and {reason}: set "trajectory"',
        )


@rule("off_policy")
def correction_bounds(recipe: Recipe) -> Broken:
    """Bounds of the correction must not change or mask an on-policy token, w = 1."""
    off_policy = recipe.off_policy
    if off_policy.truncate is not RatioLevel.NONE and off_policy.cap < 1:
        yield Problem(
            "off_policy.cap",
            f"{short_toml(off_policy.cap)} would shrink the weight of on-policy tokens (w = 1): set it to 1 or more",
        )
    if off_policy.mask is Mask.NONE:
        return
    low, high = off_policy.mask_bounds
    problem = "masks on-policy tokens (w = 1): set it to 1 or"
    if low > 1:
        yield Problem("off_policy.mask_low", f"{short_toml(low)} {problem} less")
    if high < 1:
        yield Problem("off_policy.mask_high", f"{short_toml(high)} {problem} more")
    if low >= high:
        yield Problem("off_policy.mask_low", f"{short_toml(low)} is not below mask_high = {short_toml(high)}: lower it")
