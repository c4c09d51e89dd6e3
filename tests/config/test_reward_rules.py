"""What a recipe may say about rewards, and what a user reads when it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.base.errors import RecipeError
from streamrl.recipe.load import check_recipe, dump_recipe, load_recipe
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


def problems_of(*rewards: Reward, **limits: Any) -> list[str]:
    try:
        check_recipe(recipe_of(*rewards, **limits))
    except RecipeError as error:
        return error.problems
    return []


GOOD = Reward(function="a:b")


@pytest.mark.parametrize(
    ("rewards", "limits", "message"),
    [
        ((), {}, "rewards: is empty"),
        ((Reward(function="a:no-name"),), {}, '"a:no-name" does not name a function'),
        ((Reward(function=":b"),), {}, '":b" does not name a function'),
        ((GOOD, Reward(function="c:b")), {}, '"b" is the name of an earlier reward too'),
        ((Reward(function="a:b", name="x/y"),), {}, 'would break the names of metrics: write it without "/"'),
        ((Reward(function="a:b", shadow=True),), {}, "every reward is a shadow"),
        ((Reward(function="a:b", weight=0.0), Reward(function="a:c", shadow=True)), {}, "every weight is 0"),
        (
            (Reward(function="a:b", timeout_s=1.0, adaptive_timeout=AdaptiveTimeout(min_s=2.0)),),
            {},
            "min_s = 2 is above the ceiling timeout_s = 1",
        ),
        (
            (Reward(function="a:b", late_is_wrong=True, on_timeout=FailurePolicy.STOP),),
            {},
            '"stop" never happens with late_is_wrong = true',
        ),
        ((Reward(function="a:b", wrong_value=5.0),), {}, "wrong_value: 5 has no effect without late_is_wrong = true"),
        ((GOOD, Reward(function="a:c", shadow=True, on_failure=FailurePolicy.STOP)), {}, '"stop" on a shadow reward'),
        ((GOOD,), {"combine": "median"}, '"median" is no way to combine rewards'),
    ],
)
def test_a_rule_that_is_broken_says_what_to_write(
    rewards: tuple[Reward, ...], limits: dict[str, Any], message: str
) -> None:
    (problem,) = problems_of(*rewards, **limits)
    assert message in problem


def test_what_is_fine_is_not_refused() -> None:
    assert not problems_of(GOOD, Reward(function="c:b", name="other"), Reward(function="exact_match", shadow=True))
    assert not problems_of(GOOD, combine="module:function")
    assert not problems_of(Reward(function="a:b", late_is_wrong=True, wrong_value=-1.0))


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
