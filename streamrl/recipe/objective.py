"""The recipe's ``[objective]`` and ``[off_policy]``: what is differentiated, and how stale tokens are corrected.

``algorithm`` names a published method; a field that is left out (``None``) is what that method's paper says. What a
recipe comes to is ``algorithms.objective_settings``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

Share = Annotated[float, Meta(gt=0, le=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NaturalFloat = Annotated[float, Meta(ge=0)]
Positive = Annotated[int, Meta(gt=0)]
Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(gt=0, le=4096)]
"""Of processes and the like: more than any cluster has is a mistake, and the plan of a run would take for ever."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every recipe section."""


class Algorithm(StrEnum):
    """Published methods; each sets the fields of ``[objective]`` that the recipe leaves out, as its paper does.

    Two exceptions: GRPO divides by tokens, as most trainers do now, where its paper has ``sequence_mean``; a KL in the
    loss is ``k2``, whose gradient is that of KL(pi, reference), where GRPO's paper has ``k3``.
    """

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    DAPO = "dapo"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    GSPO = "gspo"
    CISPO = "cispo"
    PPO = "ppo"


class Surrogate(StrEnum):
    """The loss of a token, given its advantage A and r = pi / pi_proximal.

    ``token_clip``: -min(r A, clip(r) A) (PPO, arXiv 1707.06347). ``sequence_clip``: the same with the geometric mean of
    the sequence's ratios (GSPO, arXiv 2507.18071). ``token_weight``: -sg(clip(r)) A log pi (CISPO, arXiv 2506.13585).
    ``policy_gradient``: -r A, not clipped (REINFORCE, RLOO).
    """

    TOKEN_CLIP = "token_clip"
    SEQUENCE_CLIP = "sequence_clip"
    TOKEN_WEIGHT = "token_weight"
    POLICY_GRADIENT = "policy_gradient"


class AdvantageKind(StrEnum):
    """What a reward is compared with.

    ``group_std``, ``group_mean``: the siblings' mean, with or without their deviation. ``leave_one_out``: the mean of
    the others (RLOO, arXiv 2402.14740). ``batch``: mean and deviation of the whole batch (REINFORCE++, arXiv
    2501.03262); ``group_then_batch``: the group's mean, then the batch's deviation (REINFORCE++-baseline). ``cohort``:
    mean and deviation of the last ``cohort_batches`` batches (SortedRL trains a cohort in several, sorted by length).
    ``gae``: a learned value of each token (PPO, arXiv 1506.02438), then mean and deviation of the whole batch.
    """

    GROUP_STD = "group_std"
    GROUP_MEAN = "group_mean"
    LEAVE_ONE_OUT = "leave_one_out"
    BATCH = "batch"
    GROUP_THEN_BATCH = "group_then_batch"
    COHORT = "cohort"
    GAE = "gae"


class LossNormalization(StrEnum):
    """What a step's loss is divided by.

    ``token_mean``: all trained tokens of the batch (DAPO, arXiv 2503.14476); ``sequence_mean``: each sample's tokens,
    then samples (GRPO, arXiv 2402.03300); ``sequence_sum``: samples alone (RLOO); ``constant``: samples times
    ``sampling.max_tokens`` (Dr. GRPO, arXiv 2503.20783).
    """

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    SEQUENCE_SUM = "sequence_sum"
    CONSTANT = "constant"


class KlEstimator(StrEnum):
    """Estimators of KL(pi, reference) from one sample, http://joschu.net/blog/kl-approx.html. Left out: ``k1`` in the
    reward, ``k2`` in the loss, which have the gradient of that KL (arXiv 2510.01555)."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class KlPlace(StrEnum):
    """Where the KL to the reference model enters: the loss, or the reward of each token."""

    LOSS = "loss"
    REWARD = "reward"


class Objective(Section, frozen=True):
    """What is differentiated. ``None``: what the paper of ``algorithm`` says, for ``surrogate``, ``advantages``,
    ``loss_normalization``, ``kl_estimator``, ``kl_in`` and the clips.

    ``entropy_coefficient``: of a bonus for entropy. ``cohort_batches``: for ``advantages = "cohort"``.
    ``clip_low``, ``clip_high``: r is clipped to [1 - clip_low, 1 + clip_high]. ``dual_clip``: bound c > 1 of r where
    A < 0 (arXiv 1912.09729), 0: none. ``kl_coefficient`` > 0 keeps a frozen copy of the initial model as the reference.
    ``overlong_buffer``: DAPO's soft punishment over the last so many tokens before ``sampling.max_tokens``, at most
    ``overlong_penalty``; ``train_truncated`` false: tokens of truncated samples are left out of the loss (DAPO's
    filtering). ``discount``, ``gae_lambda``, ``value_coefficient``, ``value_clip``: PPO's critic, a linear head on the
    policy (``value_clip`` 0: not clipped) with an AdamW rate of its own, ``value_learning_rate`` (0: 0.04 / the width
    of the model, which is verl's 1e-5 at 4,096).
    """

    algorithm: Algorithm = Algorithm.GRPO
    surrogate: Surrogate | None = None
    advantages: AdvantageKind | None = None
    loss_normalization: LossNormalization | None = None
    clip_low: PositiveFloat | None = None
    clip_high: PositiveFloat | None = None
    dual_clip: NaturalFloat = 0.0
    kl_coefficient: NaturalFloat = 0.0
    kl_estimator: KlEstimator | None = None
    kl_in: KlPlace | None = None
    entropy_coefficient: float = 0.0
    overlong_buffer: Natural = 0
    overlong_penalty: NaturalFloat = 1.0
    train_truncated: bool = True
    cohort_batches: Positive = 4
    discount: Share = 1.0
    gae_lambda: Share = 1.0
    value_coefficient: NaturalFloat = 0.5
    value_clip: NaturalFloat = 0.2
    value_learning_rate: NaturalFloat = 0.0


class Proximal(StrEnum):
    """The policy that r is taken against, for tokens that an older version sampled.

    ``behavior``: the version that sampled the token. ``decoupled``: the trainer's own policy before this step, so that
    r starts at 1 and staleness is left to the correction (AReaL, arXiv 2505.24298); with one update a batch nothing is
    clipped then, and delayed steps overshoot (docs/log.md). ``interpolated``, the default: between the two in log
    space, nearer to the trainer's the staler the token (A-3PO, arXiv 2512.06547), so that the clip still holds.
    """

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
    KL and entropy terms.

    ``truncate``: w = min(w, cap) (truncated importance sampling); ``none``: w is left out. ``mask``: tokens (sequences)
    whose w is outside [``mask_low``, ``mask_high``] are left out of the surrogate. ``cap``: of w.
    ``staleness_discount`` d: weight d ** staleness. ``correct_mismatch``: also for tokens of the very version that is
    trained, where only engine and trainer differ. ``alarm``: mean absolute logprob difference of engine and trainer on
    such tokens that raises an alarm; 0: never.
    """

    proximal: Proximal = Proximal.INTERPOLATED
    truncate: RatioLevel = RatioLevel.TOKEN
    cap: PositiveFloat = 2.0
    mask: RatioLevel = RatioLevel.NONE
    mask_low: NaturalFloat = 0.5
    mask_high: PositiveFloat = 2.0
    staleness_discount: Share = 1.0
    correct_mismatch: bool = False
    alarm: NaturalFloat = 0.05
