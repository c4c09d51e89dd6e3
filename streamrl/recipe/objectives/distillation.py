"""On-policy distillation (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543): a teacher scores each sampled token. As a
reward of each token: https://thinkingmachines.ai/blog/on-policy-distillation."""

from __future__ import annotations

from enum import StrEnum

from streamrl.recipe.objectives.method import Advantages, Method
from streamrl.recipe.objectives.rloo import PolicyGradient


class TeacherAlone(Advantages, frozen=True):
    """0 by rewards: a token has the advantage that the teacher gives it (``distillation_coefficient``)"""

    name = "teacher"
    of_rewards = False


class Divergence(StrEnum):
    """Distance of the policy from its teacher. ``sampled``: log teacher - log policy of the sampled token, an unbiased
    estimate of minus the reverse KL, as an advantage. ``exact``: divergence over the whole vocabulary at each sampled
    token, by ``divergence_beta``, as a term of the loss; the teacher must be ``objective.reference``."""

    SAMPLED = "sampled"
    EXACT = "exact"


NO_REWARD = "none"
"""Built-in reward of a run that a teacher alone trains."""
DISTILLATION = Method("distillation", PolicyGradient(), TeacherAlone(), distillation_coefficient=1.0)
