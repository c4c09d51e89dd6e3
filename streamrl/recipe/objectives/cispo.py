"""CISPO (arXiv 2506.13585): the weight of a token is bounded, so that every token keeps a gradient."""

from __future__ import annotations

from streamrl.recipe.objectives.grpo import GroupStd
from streamrl.recipe.objectives.method import Method, Surrogate, SurrogateTokens, Tensor


class TokenWeight(Surrogate, frozen=True):
    """-sg(clip(r)) A log pi (CISPO, arXiv 2506.13585)"""

    name = "token_weight"
    dual_clips = False

    def loss(self, tokens: SurrogateTokens) -> tuple[Tensor, Tensor]:
        ratio_N = tokens.ratio_N.detach()
        weight_N = ratio_N.clamp(1 - tokens.clip.low, 1 + tokens.clip.high)
        return -weight_N * tokens.advantages_N * tokens.logprobs_N, weight_N != ratio_N


# The paper has no lower bound of the weight and does not print the upper one: 5, as in TRL's paper index for ScaleRL
# (arXiv 2510.13786).
CISPO = Method("cispo", TokenWeight(), GroupStd(), clip_low=1.0, clip_high=4.0)
