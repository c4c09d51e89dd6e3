"""The recipe's ``[objective]`` and ``[off_policy]``: what is differentiated, and how stale tokens are corrected.

``algorithm`` names a published method; a field that is left out (``None``) is what that method's paper says. What a
recipe comes to is ``objective_settings``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from streamrl.recipe.fields import Natural, NaturalFloat, Positive, PositiveFloat, Section, Share, advanced, doc
from streamrl.recipe.objectives.catalog import (
    ADVANTAGES,
    METHODS,
    SURROGATES,
    AdvantagesName,
    AlgorithmName,
    SurrogateName,
)
from streamrl.recipe.objectives.method import Advantages, Clip, KlPlace, LossNormalization, Surrogate
from streamrl.recipe.objectives.ppo import CriticKeys, ValueModel


class KlEstimator(StrEnum):
    """Estimators of KL(pi, reference) from one sample, http://joschu.net/blog/kl-approx.html. Left out: ``k1`` in the
    reward, ``k2`` in the loss, which have the gradient of that KL (arXiv 2510.01555)."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class Objective(CriticKeys, frozen=True):
    """The loss that is differentiated. A key that is not set is as the paper of ``algorithm`` has it."""

    algorithm: Annotated[AlgorithmName, doc("")] = "grpo"
    surrogate: Annotated[SurrogateName | None, doc("")] = None
    advantages: Annotated[AdvantagesName | None, doc("")] = None
    loss_normalization: Annotated[LossNormalization | None, doc("")] = None
    clip_low: Annotated[PositiveFloat | None, doc("r is clipped to 1 - clip_low")] = None
    clip_high: Annotated[PositiveFloat | None, doc("and to 1 + clip_high")] = None
    dual_clip: Annotated[NaturalFloat, advanced("bound c > 1 of r where A < 0 (arXiv 1912.09729), 0: none")] = 0.0
    kl_coefficient: Annotated[
        NaturalFloat, doc("of the KL to a frozen copy of the initial model, the reference (0: none)")
    ] = 0.0
    kl_estimator: Annotated[KlEstimator | None, advanced("")] = None
    kl_in: Annotated[KlPlace | None, advanced("")] = None
    entropy_coefficient: Annotated[float, doc("of a bonus for entropy")] = 0.0
    overlong_buffer: Annotated[
        Natural, doc("DAPO's soft punishment over this many tokens before sampling.max_tokens (0: none)")
    ] = 0
    overlong_penalty: Annotated[NaturalFloat, advanced("the most of that punishment")] = 1.0
    train_truncated: Annotated[
        bool, doc("false: tokens of truncated samples are left out of the loss (DAPO's filtering)")
    ] = True
    cohort_batches: Annotated[Positive, advanced('for advantages = "cohort"')] = 4


class ObjectiveSettings(Objective, frozen=True):
    """``[objective]`` with nothing left out."""

    surrogate: SurrogateName = "token_clip"
    advantages: AdvantagesName = "group_std"
    loss_normalization: LossNormalization = LossNormalization.TOKEN_MEAN
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_estimator: KlEstimator = KlEstimator.K2
    kl_in: KlPlace = KlPlace.LOSS

    @property
    def token_surrogate(self) -> Surrogate:
        """Formula named by ``surrogate``, with the keys of ``[objective.NAME]`` where it has keys of its own."""
        found: Surrogate = getattr(self, self.surrogate, SURROGATES[self.surrogate])
        return found

    @property
    def estimator(self) -> Advantages:
        """Formula named by ``advantages``, with the keys of ``[objective.NAME]`` where it has keys of its own."""
        found: Advantages = getattr(self, self.advantages, ADVANTAGES[self.advantages])
        return found

    @property
    def clip(self) -> Clip:
        """Bounds that the surrogate reads."""
        return Clip(self.clip_low, self.clip_high, self.dual_clip)

    @property
    def has_critic(self) -> bool:
        """Return whether values are trained."""
        return self.estimator.of_critic

    @property
    def has_value_model(self) -> bool:
        """Return whether the critic is a model of its own."""
        return self.has_critic and self.value_model is ValueModel.OWN

    @property
    def has_reference(self) -> bool:
        """Return whether a frozen copy of the initial model is kept."""
        return self.kl_coefficient > 0

    @property
    def trains_without_signal(self) -> bool:
        """Return whether a group whose rewards are all equal may have a gradient, so that it must be computed."""
        return not self.estimator.compares_siblings or self.kl_coefficient > 0 or self.entropy_coefficient != 0


def objective_settings(objective: Objective, *, sizes_vary: bool = False) -> ObjectiveSettings:
    """Fill in what the recipe left out, from its algorithm; the KL estimator, from where the KL enters. ``sizes_vary``:
    of groups, whose advantages must not depend on it then."""
    values = msgspec.structs.asdict(objective)
    chosen = METHODS[objective.algorithm]
    method = msgspec.structs.asdict(chosen) | {"surrogate": chosen.surrogate.name, "advantages": chosen.advantages.name}
    if sizes_vary and chosen.advantages.varies_with_size:
        method["advantages"] = "leave_one_out"
    in_reward = (objective.kl_in or method["kl_in"]) is KlPlace.REWARD
    method["kl_estimator"] = KlEstimator.K1 if in_reward else KlEstimator.K2
    return ObjectiveSettings(**{n: method[n] if value is None else value for n, value in values.items()})


def why_not_streaming(settings: ObjectiveSettings, updates_per_batch: int, epochs_per_batch: int = 1) -> str:
    """Return why training groups before their batch is complete would change the gradient; empty: it would not."""
    if updates_per_batch > 1:
        return f"training.updates_per_batch = {updates_per_batch} steps on one batch need all of it first"
    if epochs_per_batch > 1:
        return f"training.epochs_per_batch = {epochs_per_batch} passes over one batch need all of it first"
    if settings.estimator.whole_batch:
        return f'objective.advantages = "{settings.advantages}" compares with the whole batch'
    return ""


class Proximal(StrEnum):
    """The policy that r is taken against, for tokens that an older version sampled.

    ``behavior``: the version that sampled the token. ``decoupled``: the trainer's own policy before this step, so that
    r starts at 1 and staleness is left to the correction (AReaL, arXiv 2505.24298); with one update a batch nothing is
    clipped then, and delayed steps overshoot (docs/log.md). ``interpolated``, the default: between the two in log
    space, nearer to the trainer's the staler the token (A-3PO, arXiv 2512.06547), so that the clip still holds."""

    BEHAVIOR = "behavior"
    DECOUPLED = "decoupled"
    INTERPOLATED = "interpolated"


class RatioLevel(StrEnum):
    """Over what pi_proximal / pi_behavior is taken: a token, a whole sequence (product), or its geometric mean."""

    NONE = "none"
    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"


class OffPolicy(Section, frozen=True):
    """Corrections for tokens that another policy sampled: w = pi_proximal / pi_behavior multiplies their surrogate, not
    KL and entropy terms."""

    proximal: Annotated[Proximal, doc("")] = Proximal.INTERPOLATED
    truncate: Annotated[RatioLevel, doc('w = min(w, cap) (truncated importance sampling); "none": w is left out')] = (
        RatioLevel.TOKEN
    )
    cap: Annotated[PositiveFloat, doc("of w")] = 2.0
    mask: Annotated[
        RatioLevel, doc("tokens (sequences) whose w is outside of the bounds are left out of the surrogate")
    ] = RatioLevel.NONE
    mask_low: Annotated[NaturalFloat, advanced("the lower bound")] = 0.5
    mask_high: Annotated[PositiveFloat, advanced("the upper bound")] = 2.0
    staleness_discount: Annotated[Share, advanced("d: a token has weight d ** staleness")] = 1.0
    correct_mismatch: Annotated[
        bool, doc("also for tokens of the very version that is trained, where only engine and trainer differ")
    ] = False
    alarm: Annotated[
        NaturalFloat,
        advanced(
            "mean absolute logprob difference of engine and trainer on such tokens that raises an alarm (0: never)"
        ),
    ] = 0.05
