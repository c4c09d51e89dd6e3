"""GRPO (arXiv 2402.03300), DAPO (arXiv 2503.14476) and Dr. GRPO (arXiv 2503.20783), which compare siblings' rewards."""

from __future__ import annotations

from streamrl.recipe.objectives.method import Advantages, LossNormalization, Method, Surrogate, SurrogateTokens, Tensor

STD_EPSILON = 1e-4
"""Added to a group's standard deviation, as TRL and the plain loop do."""


class TokenClip(Surrogate, frozen=True):
    """-min(r A, clip(r) A) (PPO, arXiv 1707.06347)"""

    name = "token_clip"

    def loss(self, tokens: SurrogateTokens) -> tuple[Tensor, Tensor]:
        clip = tokens.clip
        ratio_N = tokens.ratio_N
        advantages_N = tokens.advantages_N
        # r has an upper bound where A > 0, and a lower one where A < 0; the dual clip is an upper bound where A < 0.
        # clamp has no gradient outside of its bounds.
        rising_N = advantages_N > 0
        falling_N = advantages_N < 0
        upper_N = advantages_N.new_full(advantages_N.shape, float("inf")).masked_fill(rising_N, 1 + clip.high)
        if clip.dual > 0:
            upper_N = upper_N.masked_fill(falling_N, clip.dual)
        lower_N = advantages_N.new_zeros(advantages_N.shape).masked_fill(falling_N, 1 - clip.low)
        bounded_N = ratio_N.clamp(lower_N, upper_N)
        return -bounded_N * advantages_N, (bounded_N != ratio_N).detach()


class GroupMean(Advantages, frozen=True):
    """minus the siblings' mean (Dr. GRPO, arXiv 2503.20783)"""

    name = "group_mean"
    compares_siblings = True
    varies_with_size = True


class GroupStd(GroupMean, frozen=True):
    """minus the siblings' mean, divided by their standard deviation (GRPO, arXiv 2402.03300)"""

    name = "group_std"

    def of_group(self, rewards_S: Tensor, centred_S: Tensor) -> Tensor:
        return centred_S / (rewards_S.std() + STD_EPSILON)


# The paper has the mean of each sequence; TRL, verl and DAPO found the mean over tokens to be better.
GRPO = Method("grpo", TokenClip(), GroupStd())
DAPO = Method("dapo", TokenClip(), GroupStd(), clip_high=0.28, dynamic_sampling=True)
DR_GRPO = Method("dr_grpo", TokenClip(), GroupMean(), LossNormalization.CONSTANT)
