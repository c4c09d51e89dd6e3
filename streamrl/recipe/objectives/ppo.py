"""PPO (arXiv 1707.06347) with a critic whose values give each token its advantage (GAE, arXiv 1506.02438)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from streamrl.recipe.fields import NaturalFloat, Section, Share, advanced
from streamrl.recipe.objectives.grpo import TokenClip
from streamrl.recipe.objectives.method import Advantages, KlPlace, Method, Value, Vector


class ValueModel(StrEnum):
    """Model of PPO's values. ``head``: a linear head on the policy, which learns both. ``own``: a copy of the initial
    model with such a head, trained whole by an AdamW of its own; every rank holds all of it."""

    HEAD = "head"
    OWN = "own"


class CriticKeys(Section, frozen=True):
    """Keys of ``[objective]`` that only a critic reads."""

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


class Gae(Advantages, frozen=True):
    """a learned value of each token (PPO, arXiv 1506.02438), then mean and deviation of the whole batch"""

    name = "gae"
    whole_batch = True
    of_critic = True

    def of_tokens(
        self, value: Value, penalties_N: Vector, values_N: Vector | None, *, discount: float, gae_lambda: float
    ) -> tuple[Vector, Vector | None]:
        import numpy as np

        assert values_N is not None
        # What the return falls by behind a token is its reward.
        returns_N = np.broadcast_to(np.float32(value), penalties_N.shape)
        rewards_N = -penalties_N - np.diff(returns_N, append=np.float32(0))
        return generalized_advantages(rewards_N, values_N, discount=discount, gae_lambda=gae_lambda)


def generalized_advantages(
    rewards_N: Vector, values_N: Vector, *, discount: float, gae_lambda: float
) -> tuple[Vector, Vector]:
    """GAE (arXiv 1506.02438) over one sample that ends with its last token: advantages and returns (advantage + value).
    Float32 [N] each. The value after the last token is 0."""
    import numpy as np

    values = values_N.astype(np.float64)
    errors = rewards_N + discount * np.append(values[1:], 0.0)[: values.size] - values
    advantages = np.zeros_like(values)
    following = 0.0
    for position in range(values.size - 1, -1, -1):
        following = float(errors[position]) + discount * gae_lambda * following
        advantages[position] = following
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)


PPO = Method("ppo", TokenClip(), Gae(), kl_in=KlPlace.REWARD)
