"""Published methods as data, the objective settings that ``[objective]`` leads to, and when training may stream."""

from __future__ import annotations

import msgspec

from streamrl.recipe.objective import (
    AdvantageKind,
    Algorithm,
    KlEstimator,
    KlPlace,
    LossNormalization,
    Objective,
    Surrogate,
    ValueModel,
)


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """A paper's values of the fields that a recipe may leave out."""

    surrogate: Surrogate = Surrogate.TOKEN_CLIP
    advantages: AdvantageKind = AdvantageKind.GROUP_STD
    loss_normalization: LossNormalization = LossNormalization.TOKEN_MEAN
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_in: KlPlace = KlPlace.LOSS
    dynamic_sampling: bool = False


METHODS: dict[Algorithm, Method] = {
    # Token mean where the paper has the mean of each sequence: what TRL, verl and DAPO found to be better.
    Algorithm.GRPO: Method(),
    Algorithm.DR_GRPO: Method(advantages=AdvantageKind.GROUP_MEAN, loss_normalization=LossNormalization.CONSTANT),
    Algorithm.DAPO: Method(clip_high=0.28, dynamic_sampling=True),
    Algorithm.RLOO: Method(
        surrogate=Surrogate.POLICY_GRADIENT,
        advantages=AdvantageKind.LEAVE_ONE_OUT,
        loss_normalization=LossNormalization.SEQUENCE_SUM,
        kl_in=KlPlace.REWARD,
    ),
    Algorithm.REINFORCE_PLUS_PLUS: Method(advantages=AdvantageKind.BATCH, kl_in=KlPlace.REWARD),
    Algorithm.REINFORCE_PLUS_PLUS_BASELINE: Method(advantages=AdvantageKind.GROUP_THEN_BATCH),
    Algorithm.GSPO: Method(
        surrogate=Surrogate.SEQUENCE_CLIP,
        loss_normalization=LossNormalization.SEQUENCE_MEAN,
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    # The paper leaves the weight without a lower bound and does not print its upper one: 5, as TRL's paper index sets
    # it for ScaleRL (arXiv 2510.13786).
    Algorithm.CISPO: Method(surrogate=Surrogate.TOKEN_WEIGHT, clip_low=1.0, clip_high=4.0),
    Algorithm.PPO: Method(advantages=AdvantageKind.GAE, kl_in=KlPlace.REWARD),
}

WITHIN_GROUPS = frozenset(
    {AdvantageKind.GROUP_STD, AdvantageKind.GROUP_MEAN, AdvantageKind.LEAVE_ONE_OUT, AdvantageKind.GROUP_THEN_BATCH}
)
"""Advantages that compare siblings: a group of one, or of equal rewards, has none."""
OF_ONE_SIZE = frozenset({AdvantageKind.GROUP_STD, AdvantageKind.GROUP_MEAN})
"""Advantages that are larger or smaller with the group, so that groups of several sizes would weigh differently."""
WHOLE_BATCH = frozenset({AdvantageKind.BATCH, AdvantageKind.GROUP_THEN_BATCH, AdvantageKind.COHORT, AdvantageKind.GAE})
"""Advantages that are whitened over the batch: known when it is complete, and not before."""


class ObjectiveSettings(Objective, frozen=True):
    """``[objective]`` with nothing left out."""

    surrogate: Surrogate = Surrogate.TOKEN_CLIP
    advantages: AdvantageKind = AdvantageKind.GROUP_STD
    loss_normalization: LossNormalization = LossNormalization.TOKEN_MEAN
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_estimator: KlEstimator = KlEstimator.K2
    kl_in: KlPlace = KlPlace.LOSS

    @property
    def has_critic(self) -> bool:
        """Whether values are trained."""
        return self.advantages is AdvantageKind.GAE

    @property
    def has_value_model(self) -> bool:
        """Whether the critic is a model of its own."""
        return self.has_critic and self.value_model is ValueModel.OWN

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the initial model is kept."""
        return self.kl_coefficient > 0

    @property
    def trains_without_signal(self) -> bool:
        """Whether a group whose rewards are all equal may have a gradient, so that it must be computed."""
        return self.advantages not in WITHIN_GROUPS or self.kl_coefficient > 0 or self.entropy_coefficient != 0


def objective_settings(objective: Objective, *, sizes_vary: bool = False) -> ObjectiveSettings:
    """Fill in what the recipe left out, from its algorithm; the KL estimator, from where the KL enters. ``sizes_vary``:
    of groups, whose advantages must not depend on it then."""
    values = msgspec.structs.asdict(objective)
    method = msgspec.structs.asdict(METHODS[objective.algorithm])
    if sizes_vary and method["advantages"] in OF_ONE_SIZE:
        method["advantages"] = AdvantageKind.LEAVE_ONE_OUT
    in_reward = (objective.kl_in or method["kl_in"]) is KlPlace.REWARD
    method["kl_estimator"] = KlEstimator.K1 if in_reward else KlEstimator.K2
    return ObjectiveSettings(**{n: method[n] if value is None else value for n, value in values.items()})


def why_not_streaming(settings: ObjectiveSettings, updates_per_batch: int, epochs_per_batch: int = 1) -> str:
    """Return why training groups before their batch is complete would change the gradient; empty: it would not."""
    if updates_per_batch > 1:
        return f"training.updates_per_batch = {updates_per_batch} steps on one batch need all of it first"
    if epochs_per_batch > 1:
        return f"training.epochs_per_batch = {epochs_per_batch} passes over one batch need all of it first"
    if settings.advantages in WHOLE_BATCH:
        return f'objective.advantages = "{settings.advantages}" compares with the whole batch'
    return ""
