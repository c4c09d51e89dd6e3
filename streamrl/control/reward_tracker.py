"""Mean rewards of prompts over the steps of a run, as baselines of their next samples (SPO, arXiv 2509.13232).

``apply`` lets the tracker learn a batch once it is trained, and ``decide`` gives each group that joins a batch its
baseline. The tracker is a part of ``RunState``, so a resumed run has the same baselines."""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct, field

from streamrl.base.types import Baseline
from streamrl.buffers.rollout_buffer import Group
from streamrl.recipe.objectives.spo import TrackedBaseline


class DiscountedSum(Struct, kw_only=True, omit_defaults=True):
    """A sum of values and their number, of which older ones have lost weight. ``policy_change``: change of the policy,
    added up over the run, when the newest value came."""

    total: float = 0.0
    weight: float = 0.0
    policy_change: float = 0.0

    def after(self, policy_change: float, rule: TrackedBaseline) -> tuple[float, float]:
        """(total, weight) once the policy has changed by ``policy_change`` in all (SPO, arXiv 2509.13232)."""
        memory = 2.0 ** (-(policy_change - self.policy_change) / rule.half_change)
        memory = min(max(memory, rule.least_memory), rule.most_memory)
        return memory * self.total, memory * self.weight

    def add(self, values: Iterable[float], policy_change: float, rule: TrackedBaseline) -> None:
        """Add new ``values``."""
        self.total, self.weight = self.after(policy_change, rule)
        for value in values:
            self.total += value
            self.weight += 1
        self.policy_change = policy_change


class RewardTracker(Struct, kw_only=True, omit_defaults=True):
    """Rewards of the prompts that were trained.

    ``prompts``: rewards of each prompt, by its id;
    ``rewards``: rewards of all prompts;
    ``squared_errors``: squares of the differences between rewards and their baselines;
    ``policy_change``: sum over the steps of the mean absolute change of a token's logprob. The change over several
    steps is at most this sum, so prompts that were not seen for long are forgotten sooner than in the paper, which
    measures it with the last completion of each prompt."""

    prompts: dict[str, DiscountedSum] = {}
    rewards: DiscountedSum = field(default_factory=DiscountedSum)
    squared_errors: DiscountedSum = field(default_factory=DiscountedSum)
    policy_change: float = 0.0

    def baseline(self, prompt_id: str, rule: TrackedBaseline) -> Baseline:
        """Return the baseline of a group of the prompt that is trained now."""
        total, weight = self.prompts.get(prompt_id, DiscountedSum()).after(self.policy_change, rule)
        if self.rewards.weight:
            total += rule.prior * self.rewards.total / self.rewards.weight
            weight += rule.prior
        variance = 0.0
        if self.squared_errors.weight:
            variance = self.squared_errors.total / self.squared_errors.weight
        return Baseline(total=total, weight=weight, deviation=math.sqrt(variance) or 1.0)

    def learn(self, groups: Iterable[Group], change: float, rule: TrackedBaseline) -> None:
        """Add the rewards of the groups of a batch. ``change``: mean absolute change of a token's logprob by the
        optimizer steps on the batch."""
        self.policy_change += change
        rewards: list[float] = []
        squared_errors: list[float] = []
        for group in groups:
            rewards_of_group = [member.reward for member in group.members.values()]
            prompt = self.prompts.setdefault(group.prompt.prompt_id, DiscountedSum(policy_change=self.policy_change))
            prompt.add(rewards_of_group, self.policy_change, rule)
            rewards += rewards_of_group
            if group.baseline is not None:
                squared_errors += squared_errors_of(rewards_of_group, group.baseline)
        self.rewards.add(rewards, self.policy_change, rule)
        self.squared_errors.add(squared_errors, self.policy_change, rule)


def squared_errors_of(rewards: list[float], baseline: Baseline) -> list[float]:
    """Squares of the differences between ``rewards`` of a group and their baselines, of which each has the rewards of
    the siblings. Empty where nothing is known of the prompt, and there are no siblings."""
    weight = baseline.weight + len(rewards) - 1
    if weight <= 0:
        return []
    total = baseline.total + sum(rewards)
    return [(reward - (total - reward) / weight) ** 2 for reward in rewards]
