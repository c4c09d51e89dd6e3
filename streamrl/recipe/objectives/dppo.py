"""DPPO (arXiv 2602.04879): the change of a token's probability is bounded, in place of its ratio."""

from __future__ import annotations

from streamrl.recipe.objectives.grpo import GroupStd
from streamrl.recipe.objectives.method import Method, Surrogate, SurrogateTokens, Tensor


class DivergenceMask(Surrogate, frozen=True):
    """-r A; 0 where pi - pi_proximal is above clip_high and A > 0, or below -clip_low and A < 0 (DPPO's binary total
    variation, arXiv 2602.04879)"""

    name = "divergence_mask"
    dual_clips = False

    def loss(self, tokens: SurrogateTokens) -> tuple[Tensor, Tensor]:
        advantages_N = tokens.advantages_N
        change_N = tokens.logprobs_N.detach().exp() - tokens.proximal_N.exp()
        rises_N = (advantages_N > 0) & (change_N > tokens.clip.high)
        falls_N = (advantages_N < 0) & (change_N < -tokens.clip.low)
        outside_N = rises_N | falls_N
        return (-tokens.ratio_N * advantages_N).masked_fill(outside_N, 0.0), outside_N


# The bound of the authors' recipes for verl; prime-rl has 0.2, and a KL to the policy that sampled beside it.
DPPO = Method("dppo", DivergenceMask(), GroupStd(), clip_low=0.15, clip_high=0.15)
