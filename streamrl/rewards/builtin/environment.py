"""The reward ``environment``: the reward that the environment of a trajectory returned. Listed in ``catalog``."""

from __future__ import annotations

from streamrl.recipe.environment import ENVIRONMENT_REWARD
from streamrl.rewards.declared import BuiltinReward, Options, RewardCallable, declare


class EnvironmentOptions(Options, frozen=True):
    """No options. A trajectory whose environment returned nothing has no reward, so it fails unless another reward
    applies."""


def _environment(_: EnvironmentOptions) -> RewardCallable:
    def environment(_completion: str, *, environment_reward: float | None) -> float | None:
        return environment_reward

    return declare(environment, provided=["environment_reward"])


ENVIRONMENT = BuiltinReward(ENVIRONMENT_REWARD, EnvironmentOptions, _environment)
