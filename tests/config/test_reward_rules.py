"""What a recipe may say about rewards, and what a user reads when it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.base.errors import RecipeError
from streamrl.recipe.load import dump_recipe, load_recipe
from streamrl.recipe.rewards import AdaptiveTimeout, FailurePolicy, Reward, RewardLimits
from streamrl.recipe.sections import Model, Prompts, Recipe

HEAD = '[model]\npath = "m"\n\n[prompts]\ntrain = "t.jsonl"\n\n'


def recipe_of(*rewards: Reward, **limits: Any) -> Recipe:
    return Recipe(
        model=Model(path="/m"),
        prompts=Prompts(train="/t.jsonl"),
        rewards=rewards,
        reward_limits=RewardLimits(**limits),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('on_failure = "zero"', ':9: rewards.0.on_failure: "zero" is not allowed: must be one of "drop_sample"'),
        (
            "[rewards.advanced.adaptive_timeout]\nfactor = 0.5",
            ":10: rewards.0.advanced.adaptive_timeout.factor: 0.5 is not allowed",
        ),
        (
            "[rewards.advanced]\nadaptive_timeout = {factr = 1}",
            ':10: rewards.0.advanced.adaptive_timeout.factr: unknown key; did you mean "factor"?',
        ),
        (
            "[rewards.advanced]\nadaptive_timeout = 3",
            ":10: rewards.0.advanced.adaptive_timeout: 3 is not allowed: must be a table",
        ),
        ('options = "x"', ':9: rewards.0.options: "x" is not allowed: must be a table'),
    ],
)
def test_a_wrong_value_is_found_where_it_stands(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "demo.toml"
    path.write_text(f'{HEAD}[[rewards]]\nfunction = "a:b"\n{text}\n')
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert message in caught.value.problems[0]


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
        environment=("JUDGE_KEY",),
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
