"""The reward runtime: the user's functions, run so that nothing they do becomes a wrong reward or a hang."""

from streamrl.rewards.decorated import as_reward, reward
from streamrl.rewards.signature import (
    PROVIDED,
    RewardFunction,
    RewardSignature,
    inspect_reward,
    load_reward,
    needed_columns,
)

__all__ = [
    "PROVIDED",
    "RewardFunction",
    "RewardSignature",
    "as_reward",
    "inspect_reward",
    "load_reward",
    "needed_columns",
    "reward",
]
