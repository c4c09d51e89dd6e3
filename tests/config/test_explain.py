"""``streamrl explain``: every key of a recipe has a sentence."""

from __future__ import annotations

import pytest
from msgspec import inspect

from streamrl.base.errors import RecipeError
from streamrl.recipe.check_fields import section_struct, struct_fields
from streamrl.recipe.sections import Recipe
from streamrl.rules.explain import explain

SECTIONS = {field.name: section_struct(field.type) for field in struct_fields(Recipe)}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_explained(section: str) -> None:
    told = "\n".join(explain(section))
    without = [
        field.name
        for field in struct_fields(SECTIONS[section])
        if f'"{field.name}"' not in told and not isinstance(field.type, inspect.EnumType)
    ]
    assert not without


def test_a_choice_is_explained_where_it_may_be_left_out() -> None:
    assert "the loss, or the reward of each token" in "\n".join(explain("objective.kl_in"))


def test_what_is_not_there_is_told_with_what_is() -> None:
    with pytest.raises(RecipeError, match=r'did you mean "max_staleness"\? Keys: '):
        explain("rollout.max_stale")
    with pytest.raises(RecipeError, match=r"nonsense: unknown section\. Sections: "):
        explain("nonsense")
