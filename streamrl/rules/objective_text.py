"""What ``[objective]`` and ``[off_policy]`` of a recipe come to, in words, for the dry run and ``streamrl explain``."""

from __future__ import annotations

from streamrl.recipe.algorithms import METHODS, ObjectiveSettings, objective_settings, why_not_streaming
from streamrl.recipe.objective import AdvantageKind, OffPolicy, Proximal, RatioLevel, Surrogate
from streamrl.recipe.problems import shown
from streamrl.recipe.sections import Recipe

_OVER = {
    RatioLevel.TOKEN: "of the token",
    RatioLevel.SEQUENCE: "of its whole sequence",
    RatioLevel.GEOMETRIC: "of its sequence (geometric mean)",
}


def objective_lines(recipe: Recipe) -> list[str]:
    """The resolved objective: the algorithm, then each field that has an effect, in the words of the recipe."""
    settings = objective_settings(recipe.objective)
    method = _assignments(settings, "surrogate", *_clip_fields(settings), "advantages", "loss_normalization")
    lines = [f"{recipe.objective.algorithm}: {method}"]
    if settings.has_critic:
        names = ("discount", "gae_lambda", "value_coefficient", "value_clip")
        own_rate = ("value_learning_rate",) if settings.value_learning_rate else ()
        lines.append("critic: " + _assignments(settings, *names, *own_rate))
    if settings.advantages is AdvantageKind.COHORT:
        lines.append(_assignments(settings, "cohort_batches"))
    if settings.has_reference:
        lines.append("reference: " + _assignments(settings, "kl_coefficient", "kl_estimator", "kl_in"))
    if settings.entropy_coefficient:
        lines.append(_assignments(settings, "entropy_coefficient"))
    if settings.overlong_buffer:
        lines.append(_assignments(settings, "overlong_buffer", "overlong_penalty"))
    if not settings.train_truncated:
        lines.append(_assignments(settings, "train_truncated"))
    if recipe.dynamic_sampling:
        lines.append("dynamic_sampling = true: groups of equal rewards are dropped and refilled")
    return lines


def _clip_fields(settings: ObjectiveSettings) -> tuple[str, ...]:
    clipped = () if settings.surrogate is Surrogate.POLICY_GRADIENT else ("clip_low", "clip_high")
    return (*clipped, "dual_clip") if settings.dual_clip else clipped


def _assignments(settings: ObjectiveSettings, *names: str) -> str:
    return ", ".join(f"{name} = {shown(getattr(settings, name))}" for name in names)


def algorithm_lines() -> list[str]:
    """What each algorithm sets, one line each."""
    lines = []
    for algorithm, method in METHODS.items():
        fields = ", ".join(
            f"{name} = {shown(getattr(method, name))}"
            for name in method.__struct_fields__
            if not (name.startswith("clip_") and method.surrogate is Surrogate.POLICY_GRADIENT)
        )
        lines.append(f"{algorithm}: {fields}")
    return lines


def streaming_notice(recipe: Recipe) -> str:
    """Why nothing streams although the recipe leaves it on; empty where it streams or was turned off."""
    reason = why_not_streaming(objective_settings(recipe.objective), recipe.training.updates_per_batch)
    return f"off, although training.advanced.streaming = true: {reason}" if recipe.training.streaming and reason else ""


def streaming_sentence(recipe: Recipe) -> str:
    """Whether groups are trained while others generate, and why not."""
    if not recipe.training.streaming:
        return "off: training.advanced.streaming = false; a batch is trained when it is complete"
    on = "on: groups are trained while others generate, with the gradient of the whole batch"
    return streaming_notice(recipe) or on


def off_policy_sentence(recipe: Recipe) -> str:
    """How tokens that another policy sampled are corrected."""
    off_policy = recipe.off_policy
    corrects_fresh = off_policy.correct_mismatch
    if recipe.on_policy:
        if not corrects_fresh:
            return "nothing to correct: every token is trained by the version that sampled it"
        return f"every token, for what engine and trainer differ by, is {_weighting(off_policy)}"
    if off_policy.proximal is Proximal.BEHAVIOR:
        sentence = "a stale token is clipped against the version that sampled it (plain PPO), and not weighted"
        fresh = f"; a token of the trained version is {_weighting(off_policy)}" if corrects_fresh else ""
        return sentence + fresh + _discount(off_policy)
    proximal = {
        Proximal.DECOUPLED: "the trainer's policy before the step",
        Proximal.INTERPOLATED: "a policy between the trainer's and the one that sampled it, by its staleness",
    }[off_policy.proximal]
    tokens = "every token" if corrects_fresh else "a stale token"
    return f"{tokens} is clipped against {proximal}, and {_weighting(off_policy)}" + _discount(off_policy)


def _weighting(off_policy: OffPolicy) -> str:
    parts = []
    if off_policy.truncate is not RatioLevel.NONE:
        parts.append(f"weighted by w {_OVER[off_policy.truncate]}, at most {off_policy.cap:g}")
    if off_policy.mask is not RatioLevel.NONE:
        bounds = f"[{off_policy.mask_low:g}, {off_policy.mask_high:g}]"
        parts.append(f"left out where w {_OVER[off_policy.mask]} is outside {bounds}")
    return " and ".join(parts) or "not corrected (truncate and mask are none)"


def _discount(off_policy: OffPolicy) -> str:
    discount = off_policy.staleness_discount
    return f"; its weight shrinks by {discount:g} for each step of staleness" if discount < 1 else ""
