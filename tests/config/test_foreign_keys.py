"""Keys of other trainers are answered with the key of a recipe, or with why there is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from streamrl.base.errors import RecipeError
from streamrl.recipe.check_fields import section_struct, struct_fields
from streamrl.recipe.load import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.rules.explain import explain
from streamrl.rules.foreign_keys import FOREIGN_KEYS, foreign_answer

SECTIONS = {field.name: section_struct(field.type) for field in struct_fields(Recipe)}
VERL = """
[data]
train_batch_size = 1024
max_response_length = 1024
[actor]
kl_loss_coef = 0.001
[sampling]
stop = ["</s>"]
[rollout]
n = 5
"""


def test_every_key_that_an_answer_names_is_one_of_a_recipe() -> None:
    assert len(FOREIGN_KEYS) >= 100
    for key, answer in FOREIGN_KEYS.items():
        named = [(section, name) for section, name in re.findall(r"\b([a-z_]+)\.(?:N\.)?([a-z_0-9]+)", answer)]
        here = [(section, name) for section, name in named if section in SECTIONS and name not in ("jsonl", "md")]
        assert all(name in SECTIONS[section].__struct_fields__ for section, name in here), (key, answer)
        assert here or answer.startswith("-"), f"{key} is answered with no key"


def test_no_foreign_key_is_a_key_of_a_recipe() -> None:
    own = {name for section in SECTIONS.values() for name in section.__struct_fields__} | SECTIONS.keys()
    assert not (FOREIGN_KEYS.keys() & own) - {"objective"}


def test_each_key_of_a_recipe_for_verl_is_answered(tmp_path: Path) -> None:
    recipe = tmp_path / "verl.toml"
    recipe.write_text('[model]\npath = "m"\n[prompts]\ntrain = "t.jsonl"\n[[rewards]]\nfunction = "a:b"\n' + VERL)
    with pytest.raises(RecipeError) as refused:
        load_recipe(recipe)
    told = "\n".join(refused.value.problems)
    assert "data.train_batch_size: unknown key: that is rollout.prompts_per_batch (x rollout.group_size" in told
    assert "data.max_response_length: unknown key: that is sampling.max_tokens here" in told
    assert "actor.kl_loss_coef: unknown key: that is objective.kl_coefficient here" in told
    assert "sampling.stop: unknown key: there is no such key here: a completion ends with" in told
    assert "rollout.n: unknown key: that is rollout.group_size here" in told


def test_explain_answers_them_with_the_key_that_is_here() -> None:
    told = explain("lr")
    assert told[0] == "lr: that is training.learning_rate here"
    assert any(line.startswith("learning_rate: a number") for line in told)
    assert explain("actor_rollout_ref.rollout.n")[0].endswith("that is rollout.group_size here")
    assert explain("critic.optim.lr")[0].endswith("that is objective.value_learning_rate here")
    assert explain("report_to") == [f"report_to: {foreign_answer('report_to')}"]
