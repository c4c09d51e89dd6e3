"""The recipe's ``[objective]`` and ``[off_policy]``: the loss, and the correction for stale tokens. Trainer ranks
compute both (``learning.objective``).

``algorithm`` names a published method; a field that is not set (None) has the value of the method's paper.
``objective_settings`` returns the values of all fields."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta
from msgspec.structs import asdict, replace

from streamrl.base.types import JsonObject
from streamrl.recipe.field_types import Natural, NaturalFloat, Positive, PositiveFloat, Section, Share, advanced
from streamrl.recipe.objectives.catalog import (
    ALL_ADVANTAGES,
    ALL_SURROGATES,
    METHODS,
    AdvantagesName,
    AlgorithmName,
    SurrogateName,
)
from streamrl.recipe.objectives.custom import CUSTOM
from streamrl.recipe.objectives.distillation import Divergence
from streamrl.recipe.objectives.method import Advantages, Clip, KlPlace, LossNormalization, Surrogate
from streamrl.recipe.objectives.ppo import CriticKeys, ValueModel
from streamrl.recipe.objectives.sapo import SoftGate
from streamrl.recipe.objectives.spo import TrackedBaseline


class KlEstimator(StrEnum):
    """Estimator of KL(pi, reference) from one sample, http://joschu.net/blog/kl-approx.html. Not set: ``k1`` in the
    reward, ``k2`` in the loss, whose gradients are that of the KL (arXiv 2510.01555)."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class Objective(CriticKeys, frozen=True):
    """The loss. A key that is not set has the value of the paper of ``algorithm``."""

    algorithm: AlgorithmName = "grpo"
    function: Annotated[
        str, "module:name or file.py:name of a loss of your own; of advantages where advantages = custom"
    ] = ""
    options: Annotated[JsonObject, advanced, "further arguments of function"] = {}
    surrogate: SurrogateName | None = None
    advantages: AdvantagesName | None = None
    loss_normalization: LossNormalization | None = None
    clip_low: Annotated[
        PositiveFloat | None, "lower bound of r: 1 - clip_low (divergence_mask: of a probability's change)"
    ] = None
    clip_high: Annotated[
        PositiveFloat | None, "upper bound of r: 1 + clip_high (divergence_mask: of a probability's change)"
    ] = None
    dual_clip: Annotated[NaturalFloat, advanced, "bound c > 1 of r where A < 0 (arXiv 1912.09729), 0: none"] = 0.0
    reference: Annotated[
        str, "frozen model to compare with: a directory, or a model of the Hub (empty: the initial model)"
    ] = ""
    kl_coefficient: Annotated[NaturalFloat, "coefficient of the KL to the reference (0: none)"] = 0.0
    distillation_coefficient: Annotated[
        NaturalFloat | None,
        "coefficient of log teacher - log policy of each sampled token, which is added to its advantage (not set: 1 "
        'for algorithm = "distillation", else 0)',
    ] = None
    divergence: Annotated[Divergence, advanced] = Divergence.SAMPLED
    divergence_beta: Annotated[
        float,
        Meta(ge=0, le=1),
        advanced,
        "share of the teacher in the mixture of the generalised Jensen-Shannon divergence (arXiv 2306.13649): 1 is the "
        "reverse KL(policy, teacher), 0 the forward KL(teacher, policy)",
    ] = 1.0
    soft_gate: Annotated[SoftGate, advanced, "keys of SAPO's surrogate"] = SoftGate()
    kl_estimator: Annotated[KlEstimator | None, advanced] = None
    kl_in: Annotated[KlPlace | None, advanced] = None
    entropy_coefficient: Annotated[float, "coefficient of a bonus for entropy"] = 0.0
    overlong_buffer: Annotated[
        Natural, "DAPO's soft punishment over this many tokens before sampling.max_tokens (0: none)"
    ] = 0
    overlong_penalty: Annotated[NaturalFloat, advanced, "largest punishment of overlong_buffer"] = 1.0
    train_truncated: Annotated[
        bool, "false: tokens of truncated samples are left out of the loss (DAPO's filtering)"
    ] = True
    cohort_batches: Annotated[Positive, advanced, 'batches of a cohort, for advantages = "cohort"'] = 4
    tracked: Annotated[TrackedBaseline, advanced, 'baselines of prompts, for advantages = "tracked"'] = (
        TrackedBaseline()
    )


class ObjectiveSettings(Objective, frozen=True):
    """``[objective]`` with a value for every key."""

    surrogate: SurrogateName = "token_clip"
    advantages: AdvantagesName = "group_std"
    loss_normalization: LossNormalization = LossNormalization.TOKEN_MEAN
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_estimator: KlEstimator = KlEstimator.K2
    kl_in: KlPlace = KlPlace.LOSS
    distillation_coefficient: float = 0.0

    @property
    def token_surrogate(self) -> Surrogate:
        """Formula of ``surrogate``, with the keys of ``[objective.NAME]`` where it has such keys."""
        formula: Surrogate = getattr(self, self.surrogate, ALL_SURROGATES[self.surrogate])
        return formula

    @property
    def estimator(self) -> Advantages:
        """Formula of ``advantages``, with the keys of ``[objective.NAME]`` where it has such keys."""
        formula: Advantages = getattr(self, self.advantages, ALL_ADVANTAGES[self.advantages])
        return formula

    @property
    def is_custom(self) -> bool:
        """Whether ``function`` computes the loss, or advantages."""
        return CUSTOM in (self.surrogate, self.advantages)

    @property
    def clip(self) -> Clip:
        """Bounds of the surrogate."""
        return Clip(self.clip_low, self.clip_high, self.dual_clip)

    @property
    def has_critic(self) -> bool:
        """Whether values are trained."""
        return self.estimator.of_critic

    @property
    def has_value_model(self) -> bool:
        """Whether the critic is a separate model."""
        return self.has_critic and self.value_model is ValueModel.OWN

    @property
    def has_reference(self) -> bool:
        """Whether ranks hold a frozen model to compare with."""
        return self.kl_coefficient > 0 or (self.distils and bool(self.reference))

    @property
    def penalizes_reward(self) -> bool:
        """Whether the KL to the reference is a part of the rewards."""
        return self.kl_coefficient > 0 and self.kl_in is KlPlace.REWARD

    @property
    def distils(self) -> bool:
        """Whether a teacher scores each sampled token."""
        return self.distillation_coefficient > 0

    @property
    def scores_by_reference(self) -> bool:
        """Whether the logprobs of sampled tokens under the reference are needed before a batch is trained."""
        return self.kl_coefficient > 0 or (self.has_reference and not self.exact_divergence)

    @property
    def exact_divergence(self) -> bool:
        """Whether the loss has the divergence over the vocabulary, for which the teacher's logits are needed."""
        return self.distils and self.divergence is Divergence.EXACT

    @property
    def trains_without_signal(self) -> bool:
        """Whether a group of equal rewards may have a gradient, so that it must be trained."""
        terms = self.kl_coefficient > 0 or self.entropy_coefficient != 0 or self.distils
        return terms or not self.estimator.compares_siblings


def objective_settings(objective: Objective, *, sizes_vary: bool = False) -> ObjectiveSettings:
    """Return ``objective`` with a value for every key: keys that are not set get the algorithm's value, the KL
    estimator one that fits ``kl_in``. ``sizes_vary``: whether groups differ in size; their advantages must then not
    depend on it."""
    values = asdict(objective)
    method = METHODS[objective.algorithm]
    defaults = asdict(method)
    defaults |= {"surrogate": method.surrogate.name, "advantages": method.advantages.name}
    if objective.function and objective.advantages != CUSTOM:
        defaults["surrogate"] = CUSTOM
    if sizes_vary and method.advantages.varies_with_size:
        defaults["advantages"] = "leave_one_out"
    in_reward = (objective.kl_in or method.kl_in) is KlPlace.REWARD
    defaults["kl_estimator"] = KlEstimator.K1 if in_reward else KlEstimator.K2
    return ObjectiveSettings(**{key: defaults[key] if value is None else value for key, value in values.items()})


def why_not_streaming(settings: ObjectiveSettings, updates_per_batch: int, epochs_per_batch: int = 1) -> str:
    """Return why the training of groups before their batch is complete would change the gradient; empty: it would
    not."""
    if updates_per_batch > 1:
        return f"training.updates_per_batch = {updates_per_batch} steps on one batch need all of it first"
    if epochs_per_batch > 1:
        return f"training.epochs_per_batch = {epochs_per_batch} passes over one batch need all of it first"
    if settings.estimator.whole_batch:
        return f'objective.advantages = "{settings.advantages}" compares with the whole batch'
    return ""


class Proximal(StrEnum):
    """Denominator of r for tokens that an older version sampled.

    ``behavior``: the version that sampled the token. ``decoupled``: the trainer's policy before this step, so that r
    starts at 1 and only the correction handles staleness (AReaL, arXiv 2505.24298); with one update a batch no token is
    clipped, and delayed steps overshoot. ``interpolated``, the default: between the two in log space, the
    nearer to the trainer's the staler the token (A-3PO, arXiv 2512.06547), so that tokens are still clipped."""

    BEHAVIOR = "behavior"
    DECOUPLED = "decoupled"
    INTERPOLATED = "interpolated"


class RatioLevel(StrEnum):
    """Unit of w = pi_proximal / pi_behavior: the ratio of a token, or the product or the geometric mean of the ratios
    of a sequence."""

    NONE = "none"
    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"


class Mask(StrEnum):
    """Tokens that are left out of the surrogate: those whose w, at a level of ``truncate``, is outside of the bounds.
    ``icepop``: pi_trainer / pi_behavior of each token, also of the trained version, whatever ``proximal`` is; w weighs
    those within (IcePop, arXiv 2510.18855)."""

    NONE = "none"
    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"
    ICEPOP = "icepop"


MASK_BOUNDS = (0.5, 2.0)
ICEPOP_BOUNDS = (0.5, 5.0)
"""Least and largest w that are not masked, where the recipe sets none. IcePop's are the paper's."""


class OffPolicy(Section, frozen=True):
    """Corrections for tokens that another policy sampled: w = pi_proximal / pi_behavior multiplies their surrogate, not
    KL and entropy terms."""

    proximal: Proximal = Proximal.INTERPOLATED
    truncate: Annotated[RatioLevel, 'w = min(w, cap) (truncated importance sampling); "none": w = 1'] = RatioLevel.TOKEN
    cap: Annotated[PositiveFloat, "upper bound of w"] = 2.0
    mask: Mask = Mask.NONE
    mask_low: Annotated[NaturalFloat | None, advanced, "lower bound of mask (not set: 0.5)"] = None
    mask_high: Annotated[PositiveFloat | None, advanced, "upper bound of mask (not set: 2, for icepop 5)"] = None
    staleness_discount: Annotated[Share, advanced, "d: a token has weight d ** staleness"] = 1.0
    correct_mismatch: Annotated[
        bool, "correct also tokens of the version that is trained, for the difference of engine and trainer"
    ] = False
    alarm: Annotated[
        NaturalFloat,
        advanced,
        "mean absolute logprob difference of engine and trainer on tokens of the trained version that raises an "
        "alarm (0: never)",
    ] = 0.05

    @property
    def mask_level(self) -> RatioLevel:
        """Unit of the w that is masked."""
        return RatioLevel.TOKEN if self.mask is Mask.ICEPOP else RatioLevel(self.mask)

    @property
    def mask_bounds(self) -> tuple[float, float]:
        """Least and largest w that are not masked."""
        low, high = ICEPOP_BOUNDS if self.mask is Mask.ICEPOP else MASK_BOUNDS
        if self.mask_low is not None:
            low = self.mask_low
        if self.mask_high is not None:
            high = self.mask_high
        return low, high

    @property
    def with_bounds(self) -> OffPolicy:
        """The same correction with a value of ``mask_low`` and of ``mask_high``."""
        low, high = self.mask_bounds
        return replace(self, mask_low=low, mask_high=high)

    @property
    def corrects_mismatch(self) -> bool:
        """Whether tokens of the version that is trained are corrected."""
        return self.correct_mismatch or self.mask is Mask.ICEPOP
