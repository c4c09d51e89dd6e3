"""The recipe's ``[objective]`` and ``[off_policy]``: what is differentiated, and how stale tokens are corrected.

``algorithm`` names a published method; a field that is left out (``None``) is what that method's paper says. What a
recipe comes to is ``algorithms.objective_settings``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from streamrl.recipe.fields import Natural, NaturalFloat, Positive, PositiveFloat, Section, Share, advanced, doc


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
    """Baseline and scale of an advantage.

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
    """Divisor of a step's loss. ``token_mean``: all trained tokens of the batch (DAPO, arXiv 2503.14476);
    ``sequence_mean``: each sample's tokens, then samples (GRPO, arXiv 2402.03300); ``sequence_sum``: samples alone
    (RLOO); ``constant``: samples times ``sampling.max_tokens`` (Dr. GRPO, arXiv 2503.20783)."""

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
    """Term to which the KL to the reference model is added: the loss, or the reward of each token."""

    LOSS = "loss"
    REWARD = "reward"


class ValueModel(StrEnum):
    """Model of PPO's values. ``head``: a linear head on the policy, which learns both. ``own``: a copy of the initial
    model with such a head, trained whole by an AdamW of its own; every rank holds all of it."""

    HEAD = "head"
    OWN = "own"


class Objective(Section, frozen=True):
    """The loss that is differentiated. A key that is not set is as the paper of ``algorithm`` has it."""

    algorithm: Annotated[Algorithm, doc("")] = Algorithm.GRPO
    surrogate: Annotated[Surrogate | None, doc("")] = None
    advantages: Annotated[AdvantageKind | None, doc("")] = None
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
    discount: Annotated[Share, advanced("of PPO's critic")] = 1.0
    gae_lambda: Annotated[Share, advanced("of PPO's critic")] = 1.0
    value_coefficient: Annotated[NaturalFloat, advanced("of the loss of the critic")] = 0.5
    value_clip: Annotated[NaturalFloat, advanced("of the critic's values (0: not clipped)")] = 0.2
    value_learning_rate: Annotated[
        NaturalFloat,
        advanced(
            "of the critic (0: 0.04 / the width of the model for its head, which is verl's 1e-5 at 4,096; 1e-5 below)"
        ),
    ] = 0.0
    value_model: Annotated[ValueModel, advanced("")] = ValueModel.HEAD


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
