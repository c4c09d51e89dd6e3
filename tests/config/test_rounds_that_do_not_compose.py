"""Combinations whose staleness or shares the rounds cannot keep are refused when the recipe is read."""

from __future__ import annotations

import pytest

from streamrl.recipe.scheduling import DeferredPrompts, LengthSorted, Rollout, RoundKind, TailBatching
from streamrl.recipe.sections import Model, Prompts, Recipe, Reward
from streamrl.rules.rules import broken_rules

TAIL = RoundKind.TAIL_BATCHING


def recipe(**changes: object) -> Recipe:
    rewards = (Reward(function="reward.py:f"),)
    return Recipe(model=Model(path="m"), prompts=Prompts(train="p.jsonl"), rewards=rewards, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {
                "rollout": Rollout(rounds=RoundKind.LENGTH_SORTED, max_staleness=3),
                "length_sorted": LengthSorted(partial=True, cut_tokens=4000),
            },
            "length_sorted.advanced.cut_tokens",
        ),
        (
            {
                "rollout": Rollout(rounds=TAIL, max_staleness=2),
                "tail_batching": TailBatching(
                    deferred_prompts=DeferredPrompts.RESUME, domain_column="kind", domains={"math": 2.0, "code": 1.0}
                ),
            },
            "tail_batching.deferred_prompts",
        ),
        (
            {
                "rollout": Rollout(rounds=TAIL, max_staleness=1),
                "tail_batching": TailBatching(deferred_prompts=DeferredPrompts.RESUME, prompt_oversampling=3.0),
            },
            "rollout.max_staleness",
        ),
        (
            {
                "rollout": Rollout(rounds=RoundKind.AUTO),
                "tail_batching": TailBatching(deferred_prompts=DeferredPrompts.RESUME),
            },
            "tail_batching.deferred_prompts",
        ),
        (
            {"rollout": Rollout(rounds=RoundKind.AUTO), "tail_batching": TailBatching(prompt_oversampling=1.5)},
            "tail_batching.prompt_oversampling",
        ),
    ],
)
def test_it_is_refused(changes: dict[str, object], named: str) -> None:
    assert named in " ".join(str(problem) for problem in broken_rules(recipe(**changes)))


def test_auto_takes_what_it_reads() -> None:
    options = TailBatching(deferred_prompts=DeferredPrompts.VERIFY, long_round_batches=2)
    assert not list(broken_rules(recipe(rollout=Rollout(rounds=RoundKind.AUTO), tail_batching=options)))
