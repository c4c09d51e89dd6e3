"""RLOO (arXiv 2402.14740): REINFORCE with the mean of the group's other samples as baseline."""

from __future__ import annotations

from streamrl.recipe.objectives.method import (
    Advantages,
    KlPlace,
    LossNormalization,
    Method,
    Surrogate,
    SurrogateTokens,
    Tensor,
)


class PolicyGradient(Surrogate, frozen=True):
    """-r A, not clipped (REINFORCE, RLOO)"""

    name = "policy_gradient"
    clips = False
    dual_clips = False

    def loss(self, tokens: SurrogateTokens) -> tuple[Tensor, Tensor]:
        advantages_N = tokens.advantages_N
        return -tokens.ratio_N * advantages_N, advantages_N.new_zeros(advantages_N.shape).bool()


class LeaveOneOut(Advantages, frozen=True):
    """minus the mean of the others (RLOO, arXiv 2402.14740)"""

    name = "leave_one_out"
    compares_siblings = True

    def of_group(self, rewards_S: Tensor, centred_S: Tensor) -> Tensor:
        return centred_S * (len(rewards_S) / (len(rewards_S) - 1))


RLOO = Method("rloo", PolicyGradient(), LeaveOneOut(), LossNormalization.SEQUENCE_SUM, kl_in=KlPlace.REWARD)
