"""The reward ``none``: 0 for every completion, in a run that a teacher alone trains. Listed in ``catalog``."""

from __future__ import annotations

from streamrl.recipe.objectives.distillation import NO_REWARD
from streamrl.rewards.declared import BuiltinReward, Options, RewardCallable, declare


class NoOptions(Options, frozen=True):
    """No options."""


def _none(_: NoOptions) -> RewardCallable:
    def none(_completion: str) -> float:
        return 0.0

    return declare(none)


NONE = BuiltinReward(NO_REWARD, NoOptions, _none)
