"""What a recipe is refused for, with which words, and what is allowed together: one row a case, in two text files."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders.files import rows_of_table

from streamrl.base.errors import RecipeError
from streamrl.control.policies.round_policies import make_control
from streamrl.control.settings import control_settings
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.scheduling import RoundKind

HERE = Path(__file__).parent
SMALL = {"model": {"path": "m"}, "prompts": {"train": "t.jsonl"}, "rewards": [{"function": "a:b"}]}


@pytest.mark.parametrize("row", rows_of_table(HERE / "refused.txt"))
def test_what_does_not_fit_is_refused_with_a_remedy(row: str) -> None:
    overrides, _, expected = row.partition(" -> ")
    key, _, words = expected.partition(": ")
    with pytest.raises(RecipeError) as caught:
        load_recipe(SMALL, overrides.split(" ; "))
    found = [problem for problem in caught.value.problems if problem.split(": ")[1] == key]
    assert len(found) == 1 and words in found[0], caught.value.problems


@pytest.mark.parametrize("row", rows_of_table(HERE / "allowed.txt"))
def test_fitting_settings_have_the_slots_of_the_recipe(row: str) -> None:
    """Settings that fit are allowed, and control has the slots that the recipe counts."""
    made = load_recipe(SMALL, row.split(" ; "))
    if made.rollout.rounds is not RoundKind.CUSTOM:
        rules = make_control(control_settings(made)).rules
        assert (rules.slots, rules.policy.on_policy) == (made.max_in_flight, made.on_policy)


def test_as_many_problems_as_there_are() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(SMALL, ["group_sizing.advanced.dwell=3", "group_sizing.advanced.shares=[1.0]"])
    assert [problem.split(": ")[1].rpartition(".")[2] for problem in caught.value.problems] == ["dwell", "shares"]


def test_a_rule_that_reads_a_bad_value_is_not_judged() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(SMALL, ["rollout.rounds=oops", "rollout.max_staleness=3"])
    assert [problem.split(": ")[1] for problem in caught.value.problems] == ["rollout.rounds"]
