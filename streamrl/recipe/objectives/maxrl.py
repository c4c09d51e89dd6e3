"""MaxRL (arXiv 2602.02710): the gradient of the log of the success rate, so that hard prompts weigh more."""

from __future__ import annotations

from streamrl.base.errors import RecipeError
from streamrl.recipe.objectives.grpo import GroupMean, TokenClip
from streamrl.recipe.objectives.method import Method, Tensor


class GroupRatio(GroupMean, frozen=True):
    """minus the siblings' mean, divided by this mean; rewards are 0 or more (MaxRL, arXiv 2602.02710)"""

    name = "group_ratio"
    positive_rewards = True

    def of_group(self, rewards_S: Tensor, centred_S: Tensor) -> Tensor:
        lowest = float(rewards_S.min())
        if lowest < 0:
            raise RecipeError(
                f'objective.advantages = "group_ratio" divides by the mean reward of a group, and a reward is '
                f'{lowest:g}: give rewards of 0 or more, or set advantages = "group_std"'
            )
        return centred_S / rewards_S.mean()


MAXRL = Method("maxrl", TokenClip(), GroupRatio())
