"""SAPO (arXiv 2511.20347): a smooth gate in place of a clip."""

from __future__ import annotations

from typing import Annotated

from streamrl.recipe.field_types import PositiveFloat
from streamrl.recipe.objectives.grpo import GroupStd
from streamrl.recipe.objectives.method import LossNormalization, Method, Surrogate, SurrogateTokens, Tensor


class SoftGate(Surrogate, frozen=True):
    """-4 / t sigmoid(t (r - 1)) A, whose gradient fades as r leaves 1 (SAPO, arXiv 2511.20347)"""

    name = "soft_gate"
    clips = False
    dual_clips = False
    temperature_positive: Annotated[PositiveFloat, "t where A > 0"] = 1.0
    temperature_negative: Annotated[PositiveFloat, "t where A <= 0"] = 1.05

    def loss(self, tokens: SurrogateTokens) -> tuple[Tensor, Tensor]:
        advantages_N = tokens.advantages_N
        rising_N = advantages_N > 0
        temperature_N = advantages_N.new_full(advantages_N.shape, self.temperature_negative)
        temperature_N = temperature_N.masked_fill(rising_N, self.temperature_positive)
        gate_N = (temperature_N * (tokens.ratio_N - 1)).sigmoid() * 4 / temperature_N
        return -gate_N * advantages_N, advantages_N.new_zeros(advantages_N.shape).bool()


SAPO = Method("sapo", SoftGate(), GroupStd(), LossNormalization.SEQUENCE_MEAN)
