"""What a recipe may say about rewards, and what a user reads when it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builders.recipe import small_recipe
from msgspec import structs

from streamrl.recipe.environment import Credit, Environment
from streamrl.recipe.objective import Objective
from streamrl.recipe.rewards import AdaptiveTimeout, FailurePolicy, Reward, RewardLimits
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe
from streamrl.recipe.rules.rules import broken_rules
from streamrl.recipe.sections import Prompts, Recipe

HEAD = '[model]\npath = "m"\n\n[prompts]\ntrain = "t.jsonl"\n\n'


def recipe_of(*rewards: Reward, **limits: Any) -> Recipe:
    return small_recipe("/m", prompts=Prompts(train="/t.jsonl"), rewards=rewards, reward_limits=RewardLimits(**limits))


def test_credit_of_turns_that_would_have_no_effect_is_refused() -> None:
    fits, own = Environment(episode="e.py:f", credit=Credit.TURN), (Reward(function="environment"),)
    by_agent = structs.replace(fits, episode="", agent=("a",))
    for sections, said in (
        ({"rewards": own}, ""),
        ({"rewards": own, "environment": by_agent}, "with agent, whose turns"),
        ({}, 'divides the reward "environment", which is not trained'),
        ({"rewards": own, "reward_limits": RewardLimits(combine="separate")}, "divides a sum of rewards"),
        ({"rewards": own, "objective": Objective(algorithm="gspo")}, 'averaged out by surrogate = "sequence_clip"'),
    ):
        made = small_recipe(**{"environment": fits} | sections)
        found = [text for path, text in broken_rules(made) if path == "environment.advanced.credit"]
        assert len(found) == bool(said) and said in "".join(found)


def test_everything_survives_a_round_trip(tmp_path: Path) -> None:
    full = Reward(
        function="/r.py:f",
        name="full",
        options={"level": 3, "names": ["a", "b"], "nested": {"x": 0.5}},
        part_weights={"style": 0.1},
        adaptive_timeout=AdaptiveTimeout(factor=2.0, key="test"),
        retries=2,
        rate_per_s=1.5,
        on_failure=FailurePolicy.DROP_GROUP,
        variables=("JUDGE_KEY",),
    )
    recipe = recipe_of(full, Reward(function="exact_match"), combine="/c.py:product")
    path = tmp_path / "demo.toml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path).rewards == recipe.rewards
    assert load_recipe(path).reward_limits == recipe.reward_limits
    (tmp_path / "relative.toml").write_text(
        f'{HEAD}[[rewards]]\nfunction = "r.py:f"\n[rewards.options]\nlevel = 1\n[[rewards]]\nfunction = "exact_match"\n'
    )
    first, second = load_recipe(tmp_path / "relative.toml").rewards
    assert (first.function, first.options, second.function) == (f"{tmp_path}/r.py:f", {"level": 1}, "exact_match")
