"""PPO (arXiv 1707.06347) with a critic whose values give each token its advantage (GAE, arXiv 1506.02438)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from streamrl.recipe.field_types import NaturalFloat, Section, Share, advanced
from streamrl.recipe.objectives.grpo import TokenClip
from streamrl.recipe.objectives.method import Advantages, KlPlace, Method, Value, Vector


class ValueModel(StrEnum):
    """Model of PPO's values. ``head``: a linear head on the policy. ``own``: a copy of the initial model with such a
    head, all of whose weights are trained by a separate AdamW; every rank holds all of it."""

    HEAD = "head"
    OWN = "own"


class CriticKeys(Section, frozen=True):
    """Keys of ``[objective]`` for a critic."""

    discount: Annotated[Share, advanced, "discount of PPO's critic"] = 1.0
    gae_lambda: Annotated[Share, advanced, "lambda of PPO's critic (GAE)"] = 1.0
    value_coefficient: Annotated[NaturalFloat, advanced, "coefficient of the critic's loss"] = 0.5
    value_clip: Annotated[NaturalFloat, advanced, "clip of the critic's values (0: not clipped)"] = 0.2
    value_learning_rate: Annotated[
        NaturalFloat,
        advanced,
        "learning rate of the critic (0: for its head 0.04 / the width of the model, which is verl's 1e-5 at "
        "4,096; 1e-5 for the layers below)",
    ] = 0.0
    value_model: Annotated[ValueModel, advanced] = ValueModel.HEAD


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
        # The reward of a token is its return minus the next one's: a single value is paid at the last token.
        returns_N = np.broadcast_to(np.float32(value), penalties_N.shape)
        rewards_N = -penalties_N - np.diff(returns_N, append=np.float32(0))
        return generalized_advantages(rewards_N, values_N, discount=discount, gae_lambda=gae_lambda)


def generalized_advantages(
    rewards_N: Vector, values_N: Vector, *, discount: float, gae_lambda: float
) -> tuple[Vector, Vector]:
    """Compute GAE (arXiv 1506.02438) of one sample: (advantages, returns as advantage + value), float32 [N] each. The
    value after the last token is 0."""
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
